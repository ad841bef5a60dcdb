"""Requests over asyncpg behind a pooler in transaction mode: none runs another client's statement, and all succeed."""

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


def test_requests_meet_no_statement_of_another_client(urls: tuple[str, str]) -> None:
    url, through = urls
    business = Business(create_engine(url, poolclass=NullPool))
    direct = make_url(through).set(drivername="postgresql").render_as_string(hide_password=False)
    with ExitStack() as stack:  # each server, lent for a transaction, has what another process's asyncpg has prepared
        for other in [stack.enter_context(psycopg.connect(direct, prepare_threshold=None)) for _ in range(3)]:
            for number in range(1, 2000):
                other.execute(f'PREPARE "__asyncpg_stmt_{number:x}__" AS INSERT INTO effect VALUES (0, $1, $2)')
    with served(service(through, "asyncpg dependency")) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: buy(client, f"k{number % 30}", f"i{number % 30}"), range(60)))
        # Those that come while the other one is under way are told to come later.
        later = [buy(client, f"k{number}", f"i{number}").status_code for number in range(30)]
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert later == [201] * 30
    assert business.applied() == {f"i{number}": 1 for number in range(30)}
    assert business.balance() == 30
