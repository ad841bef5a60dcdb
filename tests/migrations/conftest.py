"""Empty databases: the tables are what is tested here."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, text


@pytest.fixture
def engine(fresh_database: str) -> Iterator[Engine]:
    """An engine on the test's empty database."""
    engine = create_engine(fresh_database, poolclass=NullPool)
    yield engine
    engine.dispose()


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    """A connection in a transaction that is rolled back; its search path is an empty schema. Cheap."""
    engine = create_engine(database_url, poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text("CREATE SCHEMA home_of_one_test"))
        connection.execute(text("SET LOCAL search_path TO home_of_one_test"))
        yield connection
        connection.rollback()
    engine.dispose()
