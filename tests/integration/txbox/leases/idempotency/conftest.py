"""A ledger, and the same one behind a proxy."""

from collections.abc import Callable

import pytest
from sqlalchemy import Engine

from support.txbox.leases import postgres_store
from txbox.leases import PostgresLedger


@pytest.fixture
def ledger(engine: Engine) -> PostgresLedger:
    return PostgresLedger("mailing", engine=engine)


@pytest.fixture
def expire(engine: Engine, schema_url: str) -> Callable[[str], None]:
    return postgres_store(engine, schema_url).expire


@pytest.fixture
def remote(proxied: Engine) -> PostgresLedger:
    """A ledger behind the proxy."""
    return PostgresLedger("mailing", engine=proxied)
