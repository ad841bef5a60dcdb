"""asyncpg's prepared statements behind a pooler in transaction mode: with the settings of the page on styles.

Without them, one client would run the other's statement of the same name, so recording and publishing are refused.
"""

import asyncio
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import NullPool, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from support.txbox.inbox import recorded
from txbox import AsyncInbox, AsyncOutbox, InvalidConfiguration
from txbox.postgres.drivers.asyncpg_connection import notice_pooler

pytestmark = pytest.mark.anyio

SETTINGS: dict[str, Any] = {
    "statement_cache_size": 0,
    "prepared_statement_cache_size": 0,
    "prepared_statement_name_func": lambda: "",
}
UNIQUE_NAMES = {**SETTINGS, "prepared_statement_name_func": lambda: f"__asyncpg_{uuid4()}__"}
"""As SQLAlchemy's own page has it."""


def make_engine(through: str, settings: dict[str, Any], **options: Any) -> AsyncEngine:
    url = make_url(through).set(drivername="postgresql+asyncpg", query={})
    return create_async_engine(url, connect_args=settings, **options)


async def work(through: str, settings: dict[str, Any]) -> None:
    engine = make_engine(through, settings)
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

    try:
        await asyncio.gather(*(client(number) for number in range(4)))
    finally:
        await engine.dispose()


@pytest.mark.parametrize("settings", [SETTINGS, UNIQUE_NAMES], ids=["without names", "unique names"])
async def test_with_these_settings_statements_are_never_anothers(
    pooled_urls: tuple[str, str], settings: dict[str, Any]
) -> None:
    url, through = pooled_urls
    await work(through, settings)
    engine = create_engine(url, poolclass=NullPool)
    assert recorded(engine) == sorted(
        ("billing", f"m-{number}-{message}") for number in range(4) for message in range(10)
    )
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM outbox_message").scalar_one() == 20


async def test_without_them_recording_is_refused_with_the_remedy(pooled_urls: tuple[str, str]) -> None:
    engine = make_engine(pooled_urls[1], {})
    async with engine.connect() as connection:
        with pytest.raises(InvalidConfiguration, match="prepared_statement_cache_size"):
            await AsyncInbox("billing").record(connection, "m-1")
        assert connection.invalidated
    await engine.dispose()
    assert recorded(create_engine(pooled_urls[0], poolclass=NullPool)) == []


async def test_of_an_engine_that_is_told_of_poolers_every_connection_does_without_names(
    pooled_urls: tuple[str, str],
) -> None:
    engine = make_engine(pooled_urls[1], {})
    notice_pooler(engine.sync_engine)
    notice_pooler(engine.sync_engine)
    numbers = "SELECT * FROM generate_series(1, 1000) AS number"
    for message in range(5):
        async with engine.connect() as connection:
            stream = await connection.stream(text(numbers))
            assert await anext(stream) == (1,)
            assert await AsyncInbox("billing").record(connection, f"m-{message}")
            assert await AsyncInbox("other").record_many(connection, [f"m-{message}"]) == {f"m-{message}"}
            assert len(await stream.all()) == 999
            many = [{"id": f"{message}-{number}"} for number in range(3)]
            await connection.execute(
                text("INSERT INTO processed_message (subscriber_id, message_id) VALUES ('x', :id)"), many
            )
            look = "SELECT count(*) FROM pg_prepared_statements WHERE name LIKE '%asyncpg%'"
            kept = (await connection.exec_driver_sql(look)).scalar_one()
            await connection.commit()
    await engine.dispose()
    assert kept == 0
    assert len(recorded(create_engine(pooled_urls[0], poolclass=NullPool))) == 25


async def test_a_connection_that_the_pool_had_before_is_discarded(pooled_urls: tuple[str, str]) -> None:
    engine = make_engine(pooled_urls[1], {})
    drivers = []
    for _ in range(3):
        async with engine.connect() as connection:
            drivers.append((await connection.get_raw_connection()).driver_connection)
            if len(drivers) > 1:
                assert await AsyncInbox("billing").record(connection, f"m-{len(drivers)}")
        notice_pooler(engine.sync_engine)
    await engine.dispose()
    assert drivers[0] is not drivers[1]
    assert drivers[1] is drivers[2]


async def test_without_a_pooler_statements_are_prepared_as_ever(schema_url: str) -> None:
    engine = make_engine(schema_url, {})
    notice_pooler(engine.sync_engine)
    async with engine.connect() as connection:
        for _ in range(2):
            (kept,) = (await connection.exec_driver_sql("SELECT count(*) FROM pg_prepared_statements")).one()
    await engine.dispose()
    assert kept > 0
