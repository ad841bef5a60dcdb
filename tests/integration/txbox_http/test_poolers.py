"""Requests behind a pooler in transaction mode: none runs another client's statement, and all succeed."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pytest
from sqlalchemy import NullPool, create_engine, make_url

from support.postgres.pgbouncer import pgbouncer
from support.postgres.transaction_pooler import transaction_pooler
from support.web.service import buy, served, service
from support.workers.business import Business
from txbox import Inbox
from txbox.schema import tables


@pytest.fixture(params=["ours", pytest.param("PgBouncer", marks=pytest.mark.containers)])
def urls(request: pytest.FixtureRequest, make_database: Callable[..., str]) -> Iterator[tuple[str, str]]:
    """A database with our tables, and the same behind a pooler of three servers."""
    url = make_database()
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        tables().metadata.create_all(connection)
    if request.param == "ours":
        with transaction_pooler(url, size=3) as (_, through):
            yield url, through
    else:
        with pgbouncer(url, size=3) as through:
            yield url, through


@pytest.mark.parametrize("style", ["asyncpg dependency", "async dependency", "sync dependency"])
@pytest.mark.parametrize("with_keys", [True, False])
def test_requests_meet_no_statement_of_another_client(urls: tuple[str, str], style: str, with_keys: bool) -> None:
    url, through = urls
    business = Business(create_engine(url, poolclass=NullPool))
    names = [f"__asyncpg_stmt_{number:x}__" for number in range(1, 2000)] + [f"_pg3_{number}" for number in range(100)]
    direct = make_url(through).set(drivername="postgresql").render_as_string(hide_password=False)
    with ExitStack() as stack:  # each server, lent for a transaction, has what another process's driver has prepared
        for other in [stack.enter_context(psycopg.connect(direct, prepare_threshold=None)) for _ in range(3)]:
            for name in names:
                other.execute(f'PREPARE "{name}" AS INSERT INTO effect VALUES (0, $1, $2)')
    inbox = Inbox("billing", wait_seconds=30)
    with served(service(through, style, inbox=inbox, required=False)) as client, ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda number: buy(client, f"k{number % 50}" if with_keys else None, f"i{number % 50}"), range(100)
            )
        )
    assert {answer.status_code for answer in answers} == {201}
    times = 1 if with_keys else 2
    assert business.applied() == {f"i{number}": times for number in range(50)}
    assert business.balance() == 50 * times
