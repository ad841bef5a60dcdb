"""An inbox that rotates is at a version, is checked and compared like one that is one table, and can go back to it."""

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext

import txbox_migrations
from txbox.errors import InvalidConfiguration
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox.postgres.sql import quoted
from txbox.schema import PREFIX_BYTES, tables
from txbox_migrations import LATEST, MigrationError, current_version, downgrade_database, find_drift, upgrade_database
from txbox_migrations.autogenerate import include_object

from .test_steps import SNAPSHOT

PLACES = [(None, ""), ('Odd "a:b"-%', "Odd'%_"), (None, "as_long_a_prefix_as_there_may_be_")]


@pytest.mark.parametrize(("schema", "prefix"), PLACES)
def test_there_and_back_is_as_it_was(engine: sa.Engine, schema: str | None, prefix: str) -> None:
    place = {"schema": schema, "prefix": prefix}
    upgrade_database(engine, **place)
    inbox = quoted(tables(schema, prefix).processed_message)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"GRANT SELECT, INSERT ON {inbox} TO pg_monitor WITH GRANT OPTION", ())
        connection.exec_driver_sql(f"GRANT SELECT ON {inbox} TO PUBLIC", ())
        connection.exec_driver_sql(f"COMMENT ON TABLE {inbox} IS 'what''s done'", ())
        before = list(connection.execute(SNAPSHOT).scalars())
        rights = connection.exec_driver_sql(
            "SELECT relacl::text FROM pg_class WHERE relname = %s", (f"{prefix}processed_message",)
        ).scalar_one()
    conversion = InboxConversion(engine, **place)
    assert conversion.hindrances() == []
    assert conversion.forward()
    assert conversion.forward(), "again changes nothing"
    for _ in range(2):
        with engine.begin() as connection:
            assert find_drift(connection, **place) == []
            assert current_version(connection, **place) == LATEST
            context = MigrationContext.configure(connection, opts={"include_object": include_object(**place)})
            assert schema is not None or compare_metadata(context, sa.MetaData()) == []
        assert upgrade_database(engine, **place).before == LATEST
        assert Generations(engine, **place).rotate()
    with engine.begin() as connection:
        found = connection.exec_driver_sql(
            "SELECT relacl::text FROM pg_class WHERE relname = %s", (f"{prefix}processed_message",)
        ).scalar_one()
        assert found == rights
    assert conversion.back()
    assert conversion.back(), "again changes nothing"
    with engine.begin() as connection:
        assert list(connection.execute(SNAPSHOT).scalars()) == before
        assert find_drift(connection, **place) == []
        assert current_version(connection, **place) == LATEST
    assert conversion.forward()
    assert downgrade_database(engine, to=0, **place).after == 0
    assert sa.inspect(engine).get_table_names(schema=schema) == []


@pytest.mark.parametrize("prefix", ["x" * 34, "ü" * 17], ids=["letters", "bytes"])
def test_a_prefix_that_leaves_too_few_bytes_is_refused_before_anything_is_done(engine: sa.Engine, prefix: str) -> None:
    def by_hand() -> None:
        with engine.begin() as connection:
            txbox_migrations.upgrade(Operations(MigrationContext.configure(connection)), prefix=prefix)

    def drift() -> None:
        with engine.begin() as connection:
            find_drift(connection, prefix=prefix)

    for refused in (
        lambda: upgrade_database(engine, prefix=prefix),
        lambda: txbox_migrations.migration_sql(prefix=prefix),
        by_hand,
        drift,
    ):
        with pytest.raises(MigrationError, match="has 34 bytes, and 33 are the most"):
            refused()
    with pytest.raises(InvalidConfiguration, match="has 34 bytes, and 33 are the most"):
        InboxConversion(engine, prefix=prefix).forward()
    assert sa.inspect(engine).get_table_names() == []
    assert downgrade_database(engine, prefix=prefix).after == 0, "what an older release has made can be taken back"


def test_the_longest_name_has_room_behind_the_longest_prefix() -> None:
    metadata = tables().metadata
    named = [part.name for table in metadata.tables.values() for part in (table, *table.indexes, *table.constraints)]
    longest = max(len(str(name)) for name in (*named, "processed_message_g999999_pkey") if name)
    assert longest + PREFIX_BYTES == 63


CHANGES = [
    ("DROP TABLE processed_message_g2", "generation 2 is missing"),
    (
        "ALTER TABLE processed_message_g1 DROP CONSTRAINT processed_message_g1_pkey",
        "processed_message_g1_pkey is missing",
    ),
    (
        "CREATE OR REPLACE VIEW processed_earlier AS SELECT subscriber_id, message_id FROM processed_message WHERE 1=2",
        "condition is 1 = 2; expected generation < 2",
    ),
    ("DROP VIEW processed_earlier", "the view is missing"),
    (
        "ALTER TABLE ONLY processed_message ALTER generation SET DEFAULT 1",
        "condition is generation < 2; expected generation < 1",
    ),
    ("ALTER TABLE processed_message ALTER processed_at DROP NOT NULL", "column processed_at: nullability"),
    ("CREATE TABLE other PARTITION OF processed_message FOR VALUES IN (7)", "generation other is FOR VALUES IN (7)"),
]


@pytest.fixture(scope="module")
def rotated(shared_connection: sa.Connection) -> sa.Connection:
    """A connection to tables whose inbox has rotated."""
    engine = shared_connection.engine
    upgrade_database(engine)
    assert InboxConversion(engine).forward()
    assert Generations(engine).rotate()
    return shared_connection


@pytest.mark.parametrize(("change", "sentence"), CHANGES)
def test_a_generation_that_is_not_right_is_found(rotated: sa.Connection, change: str, sentence: str) -> None:
    with rotated.begin() as transaction:
        rotated.exec_driver_sql(change)
        differences = find_drift(rotated)
        transaction.rollback()
    assert any(sentence in str(difference) for difference in differences), differences


def test_the_view_of_one_table_is_checked(engine: sa.Engine) -> None:
    upgrade_database(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE OR REPLACE VIEW processed_earlier AS SELECT subscriber_id, message_id FROM processed_message"
        )
        assert [difference.table for difference in find_drift(connection)] == ["processed_earlier"]


def test_a_revision_of_the_host_marks_a_rotating_inbox(engine: sa.Engine, next_version: int) -> None:
    with engine.begin() as connection:
        txbox_migrations.upgrade(Operations(MigrationContext.configure(connection)), to=LATEST)
    assert InboxConversion(engine).forward()
    with engine.begin() as connection:
        operations = Operations(MigrationContext.configure(connection))
        txbox_migrations.upgrade(operations, to=next_version)
        assert current_version(connection) == next_version
