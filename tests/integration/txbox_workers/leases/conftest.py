"""A ledger, and what was sent under it."""

import pytest
from sqlalchemy import Engine

from txbox.leases import PostgresLedger


@pytest.fixture
def ledger(engine: Engine) -> PostgresLedger:
    return PostgresLedger("mailing", engine=engine)


@pytest.fixture
def mails() -> list[str]:
    """What was sent: an effect that no transaction takes back."""
    return []
