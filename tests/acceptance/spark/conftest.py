"""What the campaigns of bulk loads share: files, a database of each test's own, and drivers that can be killed."""

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine

from support.spark.bulk_load_moments import PURCHASES, database
from support.spark.bulk_load_process import BulkLoadProcess
from support.spark.purchases import Books


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder that ``PURCHASES`` are in."""
    return PURCHASES.write(tmp_path_factory.mktemp("purchases") / "archive")


@pytest.fixture
def engine(fresh_database: str) -> Engine:
    """An engine that keeps no connection; whoever waits in its database, or is in a deadlock there, is the test's."""
    return database(fresh_database)


@pytest.fixture
def books(engine: Engine) -> Books:
    """The business tables."""
    return Books(engine)


@pytest.fixture(scope="module")
def driver() -> Iterator[Callable[[], BulkLoadProcess]]:
    """Start a driver's process, or take one that is at hand."""
    with BulkLoadProcess.at_hand() as driver:
        yield driver
