"""A cluster for the tests of a file, and a database for each."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from support.spark.cluster_loads import opened
from support.spark.spark_cluster import Cluster, spark_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master and two workers."""
    with spark_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def engine(fresh_database: str) -> Iterator[Engine]:
    """An engine on a database of the test's own, since event triggers are of a whole database."""
    engine = opened(fresh_database)
    yield engine
    engine.dispose()
