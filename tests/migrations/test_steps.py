"""The steps, and a made-up one after them, run one by one through alembic's operations: the host's door."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy.schema import CreateSchema

import txbox_migrations
from txbox.schema import tables
from txbox_migrations import LATEST, MigrationError, current_version, find_drift
from txbox_migrations.steps import BASELINE

PLACES = [(None, ""), ('Odd "a:b"-%', "Odd%_")]

# Every relation, column, constraint and comment outside the system schemas, as one sorted list.
SNAPSHOT = sa.text("""
    WITH ours AS (
      SELECT c.oid, c.relname, c.relkind FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
      WHERE n.nspname NOT LIKE 'pg\\_%' AND n.nspname <> 'information_schema')
    SELECT format('relation %s %s', relname, relkind) AS line FROM ours
    UNION ALL SELECT format('column %s.%s %s %s %s', relname, attname, format_type(atttypid, atttypmod), attnotnull,
                            attcollation::regcollation)
              FROM ours JOIN pg_attribute ON attrelid = ours.oid AND attnum > 0 AND NOT attisdropped
    UNION ALL SELECT format('constraint %s %s', relname, pg_get_constraintdef(k.oid))
              FROM ours JOIN pg_constraint k ON conrelid = ours.oid
    UNION ALL SELECT format('index %s', pg_get_indexdef(ours.oid)) FROM ours WHERE relkind = 'i'
    UNION ALL SELECT format('comment %s', description) FROM pg_description d
              JOIN pg_class k ON k.oid = d.classoid AND k.relname IN ('pg_class', 'pg_constraint')
              WHERE d.objoid >= 16384
    ORDER BY line
""")


def operations(connection: sa.Connection) -> Operations:
    return Operations(MigrationContext.configure(connection))


def snapshot(connection: sa.Connection) -> list[str]:
    return list(connection.execute(SNAPSHOT).scalars())


@pytest.mark.parametrize(("schema", "prefix"), PLACES)
def test_upgraded_database_has_no_drift(connection: sa.Connection, schema: str | None, prefix: str) -> None:
    if schema:
        connection.execute(CreateSchema(schema))
    txbox_migrations.upgrade(operations(connection), schema=schema, prefix=prefix)
    assert find_drift(connection, schema=schema, prefix=prefix) == []
    assert current_version(connection, schema=schema, prefix=prefix) == LATEST
    if schema is None:  # to alembic as well, comments included
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, tables().metadata) == []


@pytest.mark.parametrize(("schema", "prefix"), PLACES)
def test_each_step_goes_up_and_down_and_up_again(
    connection: sa.Connection, next_version: int, schema: str | None, prefix: str
) -> None:
    if schema:
        connection.execute(CreateSchema(schema))
    op = operations(connection)
    below = snapshot(connection)
    for before, version in pairwise((0, *range(BASELINE, next_version + 1))):
        txbox_migrations.upgrade(op, to=version, schema=schema, prefix=prefix)
        above = snapshot(connection)
        assert above != below, version
        txbox_migrations.downgrade(op, to=before, schema=schema, prefix=prefix)
        assert snapshot(connection) == below, version
        txbox_migrations.upgrade(op, to=version, schema=schema, prefix=prefix)
        assert snapshot(connection) == above, version
        below = above


@pytest.mark.parametrize(("schema", "prefix"), PLACES)
def test_staging_tables_go_with_the_ledger_and_those_of_another_place_stay(
    connection: sa.Connection, make_staging: Callable[..., list[str]], schema: str | None, prefix: str
) -> None:
    connection.execute(CreateSchema("else where"))
    if schema:
        connection.execute(CreateSchema(schema))
    make_staging(connection, schema, f"{prefix}other_")
    txbox_migrations.upgrade(operations(connection), schema="else where", prefix=prefix)
    make_staging(connection, "else where", prefix)
    for name in ("bulk_load_staging_area", "bulk_load_archive_0123456789ab_1"):
        sa.Table(f"{prefix}{name}", sa.MetaData(), schema=schema).create(connection)
    before = snapshot(connection)
    txbox_migrations.upgrade(operations(connection), schema=schema, prefix=prefix)
    make_staging(connection, schema, prefix)
    txbox_migrations.downgrade(operations(connection), schema=schema, prefix=prefix)
    assert snapshot(connection) == before


@pytest.mark.parametrize("prefix", ["v1.", "a :b'", "\\"])
def test_a_prefix_may_have_characters_that_mean_something_to_sql(
    connection: sa.Connection, make_staging: Callable[..., list[str]], prefix: str
) -> None:
    before = snapshot(connection)
    txbox_migrations.upgrade(operations(connection), prefix=prefix)
    assert find_drift(connection, prefix=prefix) == []
    make_staging(connection, None, prefix)
    txbox_migrations.downgrade(operations(connection), prefix=prefix)
    assert snapshot(connection) == before


def test_steps_that_are_there_already_are_skipped(connection: sa.Connection, next_version: int) -> None:
    op = operations(connection)
    txbox_migrations.upgrade(op, to=next_version)
    txbox_migrations.upgrade(op, to=LATEST)
    assert current_version(connection) == next_version
    txbox_migrations.downgrade(op, to=LATEST)
    txbox_migrations.downgrade(op, to=next_version)
    assert current_version(connection) == LATEST


def test_without_a_schema_the_search_path_decides(connection: sa.Connection) -> None:
    connection.execute(CreateSchema("first"))
    connection.execute(CreateSchema("second"))
    txbox_migrations.upgrade(operations(connection), schema="second")
    connection.execute(sa.text("SET LOCAL search_path TO first, second"))
    assert current_version(connection) == LATEST
    assert find_drift(connection) == []
    connection.execute(sa.text("SET LOCAL search_path TO first"))
    assert current_version(connection) == 0


def test_since_overrides_the_mark(connection: sa.Connection, next_version: int) -> None:
    tables().metadata.create_all(connection)
    with pytest.raises(MigrationError, match=r"processed_message exists.*pass since=N"):
        txbox_migrations.upgrade(operations(connection))
    txbox_migrations.upgrade(operations(connection), to=next_version, since=LATEST)
    assert current_version(connection) == next_version


def test_tables_of_before_the_baseline_are_refused_in_one_line_and_stay(connection: sa.Connection) -> None:
    op = operations(connection)
    txbox_migrations.upgrade(op, to=BASELINE)
    mark = "COMMENT ON CONSTRAINT processed_message_pkey ON processed_message IS 'txbox schema {}'"
    connection.execute(sa.text(mark.format(BASELINE - 1)))
    before = snapshot(connection)
    for run in (
        lambda: txbox_migrations.upgrade(op),
        lambda: txbox_migrations.downgrade(op),
        lambda: current_version(connection),
        lambda: find_drift(connection),
    ):
        with pytest.raises(MigrationError, match=r"^table \S+\.processed_message is at version 9, .*48c2fd12 first$"):
            run()
    assert snapshot(connection) == before
    connection.execute(sa.text(mark.format(BASELINE)))  # what they are once that commit has lifted them
    txbox_migrations.upgrade(op)
    assert current_version(connection) == LATEST
    assert find_drift(connection) == []


def test_tables_of_a_newer_release_are_refused(connection: sa.Connection) -> None:
    txbox_migrations.upgrade(operations(connection))
    connection.execute(
        sa.text("COMMENT ON CONSTRAINT processed_message_pkey ON processed_message IS 'txbox schema 99'")
    )
    with pytest.raises(MigrationError, match=r"version 99.*install the release"):
        txbox_migrations.upgrade(operations(connection))


@pytest.mark.parametrize(
    ("version", "told"),
    [
        (-1, "this release of txbox knows versions"),
        (1, f"commit 48c2fd12 .* write {BASELINE}$"),
        (BASELINE - 1, f"commit 48c2fd12 .* write {BASELINE}$"),
        (LATEST + 1, "this release of txbox knows versions"),
    ],
)
def test_a_revision_that_names_another_version_is_told_what_there_is(
    connection: sa.Connection, version: int, told: str
) -> None:
    op = operations(connection)
    for run in (txbox_migrations.upgrade, txbox_migrations.downgrade):
        with pytest.raises(MigrationError, match=f"^to={version}: .*{told}"):
            run(op, to=version)
        with pytest.raises(MigrationError, match=f"^since={version}: .*{told}"):
            run(op, to=LATEST, since=version)
