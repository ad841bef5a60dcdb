"""A database of a shop, for each test its own: a trial ends all sessions of its database."""

import uuid
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.orm import Session

from support.postgres.tables import make_tables
from txbox import Message

PURCHASE = Message("p-1", b'{"account_id": "ann", "cents": 2500}')

TABLES = """
CREATE TABLE account (account_id text PRIMARY KEY, cents bigint NOT NULL);
CREATE TABLE booking (
  number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  account_id text NOT NULL REFERENCES account,
  note text,
  at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX ON booking (account_id);
INSERT INTO account VALUES ('ann', 100);
INSERT INTO booking (account_id, note) VALUES ('ann', 'opened')"""

ADD = text("UPDATE account SET cents = cents + 2500 WHERE account_id = 'ann'")
BOOK = text("INSERT INTO booking (account_id, note) VALUES ('ann', :note)")


def apply(session: Session, message: Message) -> None:
    """A handler that is idempotent: all it does is in the transaction of its session."""
    session.execute(ADD)
    session.execute(BOOK, {"note": message.id})


@pytest.fixture(scope="session")
def template(database_url: str, admin_engine: Engine) -> Iterator[str]:
    """The name of a database with all tables, which is copied for each test."""
    name = f"test_template_{uuid.uuid4().hex[:12]}"
    with admin_engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    url = make_url(database_url).set(database=name)
    engine = create_engine(url)
    make_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(TABLES)
    engine.dispose()
    yield name
    with admin_engine.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def fresh_database(make_database: Callable[..., str], template: str) -> str:
    """The URL of a copy of the shop's database, made for one test."""
    return make_database(f"TEMPLATE {template}")


@pytest.fixture
def engine(fresh_database: str) -> Iterator[Engine]:
    engine = create_engine(fresh_database)
    yield engine
    engine.dispose()


@pytest.fixture
def own(fresh_database: str) -> Iterator[Engine]:
    """An engine of the handler's own."""
    engine = create_engine(fresh_database)
    yield engine
    engine.dispose()


@pytest.fixture
def rows(engine: Engine) -> Callable[[str], list[object]]:
    """Return what a query finds, from its first column."""

    def read(query: str) -> list[object]:
        with engine.connect() as connection:
            return list(connection.execute(text(query)).scalars())

    return read
