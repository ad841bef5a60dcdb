"""A ledger, and the same one behind a proxy."""

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, create_engine, make_url

from support.leases import postgres_store
from support.tcp_proxy import TcpProxy
from txbox.ledgers import PostgresLedger


@pytest.fixture
def ledger(engine: Engine) -> PostgresLedger:
    return PostgresLedger(engine, "mailing")


@pytest.fixture
def expire(engine: Engine, schema_url: str) -> Callable[[str], None]:
    return postgres_store(engine, schema_url).expire


@pytest.fixture
def proxy(schema_url: str) -> Iterator[TcpProxy]:
    """A proxy in front of Postgres."""
    url = make_url(schema_url)
    with TcpProxy(url.host or "127.0.0.1", url.port or 5432) as proxy:
        yield proxy


@pytest.fixture
def remote(schema_url: str, proxy: TcpProxy) -> Iterator[PostgresLedger]:
    """A ledger behind the proxy."""
    engine = create_engine(make_url(schema_url).set(host="127.0.0.1", port=proxy.port), pool_size=5)
    yield PostgresLedger(engine, "mailing")
    engine.dispose()
