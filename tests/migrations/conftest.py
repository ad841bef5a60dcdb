"""Empty databases: the tables are what is tested here."""

import runpy
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Index,
    Integer,
    MetaData,
    NullPool,
    Table,
    Text,
    create_engine,
    make_url,
    text,
)

import txbox_migrations
from support.postgres.engines import NO_HSTORE
from txbox_migrations import LATEST
from txbox_migrations.steps import STEPS


@pytest.fixture
def engine(fresh_database: str) -> Iterator[Engine]:
    """An engine on the test's empty database."""
    engine = create_engine(fresh_database, poolclass=NullPool, **NO_HSTORE)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def shared_connection(database_url: str, admin_engine: Engine) -> Iterator[Connection]:
    """A connection to a database that a module's tests share."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with admin_engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    engine = create_engine(make_url(database_url).set(database=name), poolclass=NullPool)
    with engine.connect() as connection:
        yield connection
    with admin_engine.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    """A connection in a transaction that is rolled back; its search path is an empty schema. Cheap."""
    engine = create_engine(database_url, poolclass=NullPool, **NO_HSTORE)
    with engine.connect() as connection:
        connection.execute(text("CREATE SCHEMA home_of_one_test"))
        connection.execute(text("SET LOCAL search_path TO home_of_one_test"))
        yield connection
        connection.rollback()
    engine.dispose()


STEP = """
from sqlalchemy import Column, Integer

revision = "{next}"
down_revision = "{last}"


def upgrade(op, schema, prefix):
    op.create_table(prefix + "made_up", Column("number", Integer), schema=schema)


def downgrade(op, schema, prefix):
    op.drop_table(prefix + "made_up", schema=schema)
"""


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of a made-up version after the last one, that this release then knows: it adds a table ``made_up``."""
    steps = shutil.copytree(txbox_migrations.database._STEPS, tmp_path / "steps")
    written = steps / f"step_{LATEST + 1:03}_made_up.py"
    written.write_text(STEP.format(last=LATEST, next=LATEST + 1))
    step = SimpleNamespace(**runpy.run_path(str(written)))
    monkeypatch.setattr(txbox_migrations.runner, "STEPS", (*STEPS, step))
    for module in ("runner", "version_mark", "environment", "database"):
        monkeypatch.setattr(f"txbox_migrations.{module}.LATEST", LATEST + 1)
    monkeypatch.setattr(txbox_migrations.database, "_STEPS", steps)
    return LATEST + 1


@pytest.fixture
def make_staging() -> Callable[[Connection, str | None, str], list[str]]:
    """Make the staging table of a running bulk load: make_staging(connection, schema, prefix); returns its names."""

    def make(connection: Connection, schema: str | None, prefix: str) -> list[str]:
        name = f"{prefix}bulk_load_staging_0123456789ab_12"
        whole, *parts = [
            Table(
                name + suffix, MetaData(), Column("message_id", Text), Column("chunk", Integer), schema=schema, **more
            )
            for suffix, more in (("", {"postgresql_partition_by": "LIST (chunk)"}), ("_0", {}), ("_107", {}))
        ]
        Index(f"{name}_ids", whole.c.message_id)
        whole.create(connection)
        quoted = connection.dialect.identifier_preparer.format_table
        for number, part in enumerate(parts):
            connection.exec_driver_sql(
                f"CREATE UNLOGGED TABLE {quoted(part)} PARTITION OF {quoted(whole)} FOR VALUES IN ({number})"
            )
        return [whole.name, *(part.name for part in parts)]

    return make
