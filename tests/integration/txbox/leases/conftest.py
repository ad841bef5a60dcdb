"""Both ledgers: a test that takes ``store`` or ``ledger`` is run with each. Engines on the test's schema."""

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, create_engine, make_url

from support.postgres.engines import NO_HSTORE
from support.txbox.leases import Store, dynamodb_store, postgres_store
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


@pytest.fixture
def make_engine(schema_url: str) -> Iterator[Callable[..., Engine]]:
    """Make an engine on the test's schema: make_engine(settings=" -cname=value", **options)."""
    made: list[Engine] = []

    def make(settings: str = "", **options: object) -> Engine:
        url = make_url(schema_url)
        url = url.update_query_dict({"options": f"{url.query['options']}{settings}"})
        made.append(create_engine(url, pool_size=16, **NO_HSTORE, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.dispose()
