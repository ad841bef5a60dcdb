"""asyncpg's prepared statements behind a pooler in transaction mode: with the settings of the page on styles.

Without them, one client meets the other's statement under the same name.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import NullPool, create_engine, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from support.postgres.pgbouncer import pgbouncer
from support.postgres.transaction_pooler import transaction_pooler
from support.txbox.inbox import recorded
from txbox import AsyncInbox, AsyncOutbox
from txbox.schema import tables

pytestmark = pytest.mark.anyio

SETTINGS: dict[str, Any] = {
    "statement_cache_size": 0,
    "prepared_statement_cache_size": 0,
    "prepared_statement_name_func": lambda: f"__asyncpg_{uuid4()}__",
}


@pytest.fixture(params=["ours", pytest.param("PgBouncer", marks=pytest.mark.containers)])
def urls(request: pytest.FixtureRequest, make_database: Callable[..., str]) -> Iterator[tuple[str, str]]:
    """A database with our tables, and the same behind a pooler of two servers."""
    url = make_database()
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        tables().metadata.create_all(connection)
    if request.param == "ours":
        with transaction_pooler(url, size=2) as (_, through):
            yield url, through
    else:
        with pgbouncer(url, size=2) as through:
            yield url, through


async def work(through: str, settings: dict[str, Any]) -> None:
    url = make_url(through).set(drivername="postgresql+asyncpg", query={})
    engine = create_async_engine(url, connect_args=settings, poolclass=NullPool)
    inbox, outbox = AsyncInbox("billing", wait_seconds=60), AsyncOutbox()

    async def client(number: int) -> None:
        async with engine.connect() as connection:
            for message in range(10):
                if number % 2:
                    await inbox.record(connection, f"m-{number}-{message}")
                else:
                    await outbox.publish(connection, "own:somewhere", "body")
                    await inbox.record_many(connection, [f"m-{number}-{message}"])
                await connection.commit()

    await asyncio.gather(*(client(number) for number in range(4)))


async def test_with_names_of_their_own_statements_are_never_anothers(urls: tuple[str, str]) -> None:
    url, through = urls
    await work(through, SETTINGS)
    engine = create_engine(url, poolclass=NullPool)
    assert recorded(engine) == sorted(
        ("billing", f"m-{number}-{message}") for number in range(4) for message in range(10)
    )
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM outbox_message").scalar_one() == 20


async def test_without_them_statements_meet(urls: tuple[str, str]) -> None:
    with pytest.raises(DBAPIError, match="prepared statement"):
        await work(urls[1], {})
