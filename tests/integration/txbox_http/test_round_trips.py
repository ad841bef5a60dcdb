"""Connections of requests: how often one waits for an answer of Postgres, and what lies between, such as a pooler."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pytest
from sqlalchemy import NullPool, create_engine, make_url
from sqlalchemy.exc import DBAPIError
from starlette.testclient import TestClient

from support.postgres.pooled_database import SERVERS
from support.postgres.tcp_proxy import CountingProxy, TcpProxy
from support.web.service import buy, served, service
from support.workers.business import Business
from txbox import Inbox

HANDLER = 2
"""The statements of the service's handler."""

WITH_KEY = {"sync": 4, "async": 4, "asyncpg": 6}
"""BEGIN, the record, the answer and COMMIT; the guard goes out with the first and the last, but over asyncpg."""

WITHOUT_KEY = {"sync": 2, "async": 2, "asyncpg": 4}

REPEATED = {"sync": 4, "async": 4, "asyncpg": 5}
"""BEGIN, the record, the answer that was kept, ROLLBACK."""


@pytest.mark.usefixtures("business")
@pytest.mark.parametrize("style", WITH_KEY)
@pytest.mark.parametrize("level", ["READ COMMITTED", "SERIALIZABLE"])
def test_the_guard_costs_no_round_trip_over_psycopg(schema_url: str, style: str, level: str) -> None:
    url = make_url(schema_url)
    with CountingProxy(url.host or "127.0.0.1", url.port or 5432) as proxy:
        through = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        app = service(through, f"{style} dependency", required=False, level=level)
        with served(app) as client:

            def trips(key: str | None, item: str) -> int:
                before = proxy.packets
                assert buy(client, key, item).status_code == 201
                return proxy.packets - before

            # Drivers prepare what they have seen a few times, which is one more, once.
            for number in range(12):
                counts = (
                    trips(f"k{number}", f"a{number}"),
                    trips(f"k{number}", f"a{number}"),
                    trips(None, f"b{number}"),
                )
    assert counts == (HANDLER + WITH_KEY[style], REPEATED[style], HANDLER + WITHOUT_KEY[style])


@pytest.mark.parametrize("style", ["sync", "async"])
@pytest.mark.parametrize("key", ["k1", None])
def test_of_a_connection_that_was_lost_the_error_says_so_and_its_pool_keeps_none(
    schema_url: str, business: Business, style: str, key: str | None
) -> None:
    url = make_url(schema_url)
    with TcpProxy(url.host or "127.0.0.1", url.port or 5432) as proxy:
        through = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        with TestClient(service(through, f"{style} dependency", required=False)) as client:
            assert buy(client, key, "tea").status_code == 201
            assert proxy.cut() == 1
            with pytest.raises(DBAPIError) as raised:
                buy(client, key and "k2", "coffee")
            assert raised.value.connection_invalidated
            assert buy(client, key and "k2", "coffee").status_code == 201
    assert business.applied() == {"tea": 1, "coffee": 1}


@pytest.mark.parametrize("style", ["asyncpg dependency", "async dependency", "sync dependency"])
@pytest.mark.parametrize("with_keys", [True, False])
def test_requests_meet_no_statement_of_another_client(
    pooled_urls: tuple[str, str], style: str, with_keys: bool
) -> None:
    url, through = pooled_urls
    business = Business(create_engine(url, poolclass=NullPool))
    names = [f"__asyncpg_stmt_{number:x}__" for number in range(1, 2000)] + [f"_pg3_{number}" for number in range(100)]
    direct = make_url(through).set(drivername="postgresql").render_as_string(hide_password=False)
    with ExitStack() as stack:  # each server, lent for a transaction, has what another process's driver has prepared
        for other in [stack.enter_context(psycopg.connect(direct, prepare_threshold=None)) for _ in range(SERVERS)]:
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
