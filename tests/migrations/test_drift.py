"""The drift check: every kind of change is found, harmless additions are told apart."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy.schema import CreateSchema

import txbox_migrations
from txbox.errors import NotInTransaction
from txbox.schema import TABLE_NAMES, tables
from txbox_migrations import Difference, Severity, find_drift

PLACES = [(None, ""), ("Odd drift-%", "Odd%_")]

# SQL with {} around our names; the table; what; and what is expected and found.
CHANGES = [
    (
        "ALTER TABLE {dead_letter} DROP CONSTRAINT {dead_letter_reason_check:name}",
        ("dead_letter", "constraint {p}dead_letter_reason_check"),
        (
            (
                "definition CHECK ((reason = ANY (ARRAY['failed'::text, 'mismatch'::text, 'malformed'::text, "
                "'crashed'::text, 'expired'::text, 'behind'::text])))"
            ),
            None,
        ),
    ),
    (
        (
            "ALTER TABLE {message_failure} DROP CONSTRAINT {message_failure_attempts_check:name},"
            " ADD CONSTRAINT {message_failure_attempts_check:name} CHECK (attempts >= 0)"
        ),
        ("message_failure", "constraint {p}message_failure_attempts_check: definition"),
        ("CHECK ((attempts > 0))", "CHECK ((attempts >= 0))"),
    ),
    (
        (
            "ALTER TABLE {message_failure} DROP CONSTRAINT {message_failure_attempts_check:name},"
            " ADD CONSTRAINT {message_failure_attempts_check:name} CHECK (attempts > 0) NOT VALID"
        ),
        ("message_failure", "constraint {p}message_failure_attempts_check: definition"),
        ("CHECK ((attempts > 0))", "CHECK ((attempts > 0)) NOT VALID"),
    ),
    (
        "ALTER TABLE {processed_message} DROP CONSTRAINT {processed_message_pkey:name}",
        ("processed_message", "constraint {p}processed_message_pkey"),
        ("definition PRIMARY KEY (subscriber_id, message_id)", None),
    ),
    (
        (
            "ALTER TABLE {processed_message} DROP CONSTRAINT {processed_message_pkey:name},"
            " ADD CONSTRAINT {processed_message_pkey:name} PRIMARY KEY (message_id, subscriber_id)"
        ),
        ("processed_message", "constraint {p}processed_message_pkey: definition"),
        ("PRIMARY KEY (subscriber_id, message_id)", "PRIMARY KEY (message_id, subscriber_id)"),
    ),
    (
        "DROP INDEX {dead_letter_parked_once}",
        ("dead_letter", "index {p}dead_letter_parked_once"),
        (
            (
                "uniqueness UNIQUE, definition USING btree (subscriber_id, message_id, body_hash) "
                "WHERE ((redriven_at IS NULL) AND (discarded_at IS NULL)), state valid"
            ),
            None,
        ),
    ),
    (
        (
            "DROP INDEX {dead_letter_parked_once};"
            "CREATE UNIQUE INDEX {dead_letter_parked_once:name} ON {dead_letter} (subscriber_id, message_id, body_hash)"
            " WHERE redriven_at IS NOT NULL"
        ),
        ("dead_letter", "index {p}dead_letter_parked_once: definition"),
        (
            (
                "USING btree (subscriber_id, message_id, body_hash) "
                "WHERE ((redriven_at IS NULL) AND (discarded_at IS NULL))"
            ),
            "USING btree (subscriber_id, message_id, body_hash) WHERE (redriven_at IS NOT NULL)",
        ),
    ),
    (
        (
            "DROP INDEX {dead_letter_parked_once};"
            "CREATE INDEX {dead_letter_parked_once:name} ON {dead_letter} (subscriber_id, message_id, body_hash)"
            " WHERE redriven_at IS NULL AND discarded_at IS NULL"
        ),
        ("dead_letter", "index {p}dead_letter_parked_once: uniqueness"),
        ("UNIQUE", "not unique"),
    ),
    (
        "ALTER TABLE {message_failure} ALTER attempts TYPE bigint",
        ("message_failure", "column attempts: type"),
        ("integer", "bigint"),
    ),
    (
        "ALTER TABLE {dead_letter} DROP COLUMN source",
        ("dead_letter", "column source"),
        ("type text, nullability NOT NULL, collation default", None),
    ),
    (
        'ALTER TABLE {message_failure} ALTER message_id TYPE text COLLATE "POSIX"',
        ("message_failure", "column message_id: collation"),
        ("C", "POSIX"),
    ),
    (
        "ALTER TABLE {processed_message} ALTER processed_at DROP NOT NULL",
        ("processed_message", "column processed_at: nullability"),
        ("NOT NULL", "NULL"),
    ),
    (
        "ALTER TABLE {processed_message} ALTER fingerprint SET NOT NULL",
        ("processed_message", "column fingerprint: nullability"),
        ("NULL", "NOT NULL"),
    ),
    (
        "ALTER TABLE {processed_message} ALTER processed_at SET DEFAULT clock_timestamp()",
        ("processed_message", "column processed_at: default"),
        ("now()", "clock_timestamp()"),
    ),
    (
        "ALTER TABLE {dead_letter} ALTER dead_letter_id SET GENERATED BY DEFAULT",
        ("dead_letter", "column dead_letter_id: identity"),
        ("ALWAYS", "BY DEFAULT"),
    ),
    (
        "ALTER TABLE {dead_letter} ALTER dead_letter_id DROP IDENTITY",
        ("dead_letter", "column dead_letter_id: identity"),
        ("ALWAYS", "none"),
    ),
    (
        "ALTER TABLE {processed_message} SET UNLOGGED",
        ("processed_message", "table: durability"),
        ("logged", "unlogged"),
    ),
    ("DROP TABLE {message_failure}", ("message_failure", "the table"), ("a table", None)),
    # what others add and can refuse our rows
    (
        "ALTER TABLE {processed_message} ADD tenant text NOT NULL",
        ("processed_message", "column tenant"),
        (None, "type text, nullability NOT NULL, collation default"),
    ),
    (
        "ALTER TABLE {processed_message} ADD CONSTRAINT short CHECK (length(message_id) < 10)",
        ("processed_message", "constraint short"),
        (None, "definition CHECK ((length(message_id) < 10))"),
    ),
    (
        "CREATE UNIQUE INDEX once ON {processed_message} (message_id)",
        ("processed_message", "index once"),
        (None, "uniqueness UNIQUE, definition USING btree (message_id), state valid"),
    ),
]

EXTRAS = [
    ("ALTER TABLE {processed_message} ADD note text", "column note"),
    ("ALTER TABLE {processed_message} ADD shard int NOT NULL DEFAULT 0", "column shard"),
    ("ALTER TABLE {processed_message} ADD number bigint GENERATED ALWAYS AS IDENTITY", "column number"),
    ("CREATE INDEX report ON {processed_message} (processed_at)", "index report"),
]


class Place:
    """Fills our names, quoted, into SQL."""

    def __init__(self, schema: str | None, prefix: str) -> None:
        self.schema, self.prefix = schema, prefix

    def __getitem__(self, name: str) -> "Name":
        return Name(self.schema, self.prefix + name)


class Name:
    def __init__(self, schema: str | None, name: str) -> None:
        self.schema, self.name = schema, name

    def __format__(self, only: str) -> str:
        return f'"{self.name}"' if only or not self.schema else f'"{self.schema}"."{self.name}"'


def upgraded(connection: sa.Connection, schema: str | None, prefix: str) -> None:
    if schema:
        connection.execute(CreateSchema(schema))
    op = Operations(MigrationContext.configure(connection))
    txbox_migrations.upgrade(op, schema=schema, prefix=prefix)


@pytest.fixture(scope="module")
def places(shared_connection: sa.Connection) -> sa.Connection:
    """A connection in whose open transaction there are tables at all ``PLACES``."""
    for schema, prefix in PLACES:
        upgraded(shared_connection, schema, prefix)
    return shared_connection


@pytest.fixture
def made(places: sa.Connection) -> Iterator[sa.Connection]:
    """The connection of ``places``, in a savepoint to which it returns after the test."""
    with places.begin_nested() as savepoint:
        yield places
        savepoint.rollback()


def change(connection: sa.Connection, sql: str, schema: str | None, prefix: str) -> None:
    for statement in sql.split(";"):
        connection.exec_driver_sql(statement.format_map(Place(schema, prefix)).replace("%", "%%"))


@pytest.mark.parametrize(
    ("place", "sql", "where", "values"),
    [(place, *one) for place, one in zip(itertools.cycle(PLACES), CHANGES)],
    ids=[what for _, (_, what), _ in CHANGES],
)
def test_a_change_is_found_and_nothing_else(
    made: sa.Connection,
    place: tuple[str | None, str],
    sql: str,
    where: tuple[str, str],
    values: tuple[str | None, str | None],
) -> None:
    """The places take turns: each kind of change has neighbours of its kind, and is found in both."""
    schema, prefix = place
    table, what = where
    change(made, sql, schema, prefix)
    assert find_drift(made, schema=schema, prefix=prefix) == [
        Difference(prefix + table, what.replace("{p}", prefix), *values, Severity.DRIFT)
    ]


@pytest.mark.parametrize(("schema", "prefix"), PLACES)
def test_harmless_additions_are_extras(made: sa.Connection, schema: str | None, prefix: str) -> None:
    for sql, _ in EXTRAS:
        change(made, sql, schema, prefix)
    found = find_drift(made, schema=schema, prefix=prefix)
    assert [(d.table, d.what, d.expected, d.severity) for d in found] == [
        (f"{prefix}processed_message", what, None, Severity.EXTRA) for _, what in EXTRAS
    ]


def test_comments_are_no_drift(made: sa.Connection) -> None:
    made.execute(sa.text("COMMENT ON TABLE dead_letter IS 'ask the shipping team'"))
    made.execute(sa.text("COMMENT ON COLUMN dead_letter.body IS NULL"))
    assert find_drift(made) == []


def test_an_empty_database_lacks_every_table(engine: sa.Engine) -> None:
    with engine.connect() as connection:
        found = find_drift(connection)
    assert [str(difference) for difference in found] == [
        f"{name}: the table is missing; expected a table" for name in TABLE_NAMES
    ]


def test_sentences() -> None:
    different = Difference("dead_letter", "column body: type", "bytea", "text")
    assert different.sentence == "dead_letter: column body: type is text; expected bytea"
    missing = Difference("dead_letter", "column body", "type bytea", None)
    assert missing.sentence == "dead_letter: column body is missing; expected type bytea"
    added = Difference("dead_letter", "column note", None, "type text", Severity.EXTRA)
    assert added.sentence == "dead_letter: column note was added: type text"


def test_nothing_is_left_behind_and_the_callers_transaction_goes_on(engine: sa.Engine) -> None:
    temporary = sa.text("SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema()")
    with engine.connect() as connection:
        upgraded(connection, None, "")
        assert find_drift(connection) == []
        assert connection.in_transaction()
        assert connection.execute(temporary).scalar_one() == 0
        connection.commit()
        assert find_drift(connection) == []
        assert not connection.in_transaction()
        assert connection.execute(temporary).scalar_one() == 0
        assert find_drift(connection) == []


def test_no_object_of_ours_needs_to_be_on_the_search_path(connection: sa.Connection) -> None:
    upgraded(connection, "billing", "")
    connection.execute(sa.text("SET LOCAL search_path TO ''"))
    assert find_drift(connection, schema="billing") == []


@pytest.mark.parametrize(("schema", "prefix"), PLACES)
def test_staging_tables_are_no_drift(
    made: sa.Connection, make_staging: Callable[..., list[str]], schema: str | None, prefix: str
) -> None:
    make_staging(made, schema, prefix)
    assert find_drift(made, schema=schema, prefix=prefix) == []


def test_tables_of_metadata_have_no_drift(connection: sa.Connection) -> None:
    tables().metadata.create_all(connection)
    assert find_drift(connection) == []


def test_autocommit_is_refused(engine: sa.Engine) -> None:
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(NotInTransaction),
    ):
        find_drift(connection)
