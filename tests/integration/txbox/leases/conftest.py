"""Both ledgers: a test that takes ``store`` or ``ledger`` is run with each."""

import pytest

from support.leases import Store, dynamodb_store, postgres_store
from txbox.leases import Ledger


@pytest.fixture(params=["postgres", "dynamodb"])
def store(request: pytest.FixtureRequest) -> Store:
    """Each store in turn."""
    if request.param == "postgres":
        return postgres_store(request.getfixturevalue("engine"), request.getfixturevalue("schema_url"))
    return dynamodb_store(request.getfixturevalue("dynamodb"))


@pytest.fixture
def ledger(store: Store) -> Ledger:
    return store.ledger()
