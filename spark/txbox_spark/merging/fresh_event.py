"""Builds the SQL that depends on the events' columns, over ``fresh_event`` and other tables with these columns.

It also turns Arrow's columns into lines of CSV for COPY. Every text is quoted, so that only null is an empty field. A
line takes a tenth of a microsecond, while Spark's own expressions take one. This module decides how a type is written
as text for the types that ``columns`` sends unchanged; all others are text already. Binary COPY would be faster, but it
cannot send a text for a declared type, and it accepts times before the year 1, which are rejected as text.

https://www.postgresql.org/docs/current/sql-copy.html
"""

from collections.abc import Sequence

from psycopg import sql as psycopg_sql

from txbox.postgres.sql import quote, unescaped
from txbox_spark.reading.columns import MESSAGE_ID, EventColumn
from txbox_spark.reading.row_order import ANY, ROW_ORDER, is_latest
from txbox_spark.runtime.lazy_imports import compute, csv, pyarrow

SHOWN_EXPIRED = 5
"""How many ids of expired events the log names for each chunk."""

FRESH_EVENT = "pg_temp.fresh_event"
"""The events of a chunk that are first. The caller's statements name it without a schema."""


HELD_EVENT = "pg_temp.txbox_held"
"""Holds the same events while the effect is tried with parts of them."""


def create_fresh(columns: Sequence[EventColumn]) -> str:
    """Return SQL that creates ``fresh_event`` with the source's names.

    A column that equals the id is generated from it, and is not sent.
    """
    made = f'text COLLATE "C" GENERATED ALWAYS AS ({MESSAGE_ID}) STORED'
    defined = [f"{quote(one.name)} {made if one.staged_as == MESSAGE_ID else one.postgres_type}" for one in columns]
    return f"CREATE TEMPORARY TABLE {FRESH_EVENT} ({', '.join([_ID, *defined])}) ON COMMIT DROP"


def copy_fresh(columns: Sequence[EventColumn]) -> str:
    """Return SQL that copies a chunk's distinct events, as CSV with quoted text, for a psycopg cursor.

    Arrow's texts are UTF-8, whatever the session's encoding.
    """
    names = ", ".join([MESSAGE_ID, *(quote(one.name) for one in _sent(columns))])
    return f"COPY {FRESH_EVENT} ({unescaped(names)}) FROM STDIN (FORMAT csv, ENCODING 'UTF8')"


def insert_fresh(columns: Sequence[EventColumn], staged: str, processed_in_range: str, keep: str) -> str:
    """Return SQL that fills ``fresh_event`` with the staged events whose ids the inbox lacks, one of each id, sorted.

    ``staged`` is the quoted table or query that has them; ``processed_in_range`` is from chunk_merger.sql; ``keep``
    says which of several rows with the same id to take.
    """
    sent = _sent(columns)
    names = ", ".join([MESSAGE_ID, *(quote(one.name) for one in sent)])
    values = ", ".join([MESSAGE_ID, *(one.staged_as for one in sent)])
    return (
        f"INSERT INTO {FRESH_EVENT} ({names}) SELECT DISTINCT ON (message_id) {values} FROM {staged} AS event "  # noqa: S608
        f"WHERE NOT EXISTS (SELECT FROM {processed_in_range}) ORDER BY {_first_of_each(keep)}"
    )


def distinct_staged(names: Sequence[str], staged: str, keep: str) -> str:
    """Return a query for the staged events, one of each id, sorted, for a psycopg cursor."""
    return unescaped(
        f"SELECT DISTINCT ON (message_id) {', '.join(names)} FROM {staged} AS event ORDER BY {_first_of_each(keep)}"  # noqa: S608
    )


def differing_ids(columns: Sequence[EventColumn], staged: str) -> str:
    """Return a query that counts the ids whose staged rows differ, and names some of them.

    Rows that a task staged again are equal.
    """
    content = f"ROW({', '.join(one.staged_as for one in _sent(columns))})::text"
    return (
        "SELECT count(*), (array_agg(message_id ORDER BY message_id))[1:10] FROM ("  # noqa: S608 - quoted
        f"SELECT message_id FROM {staged} AS event GROUP BY message_id "
        f"HAVING count(*) > 1 AND min({content}) <> max({content})) AS differing"
    )


def _first_of_each(keep: str) -> str:
    """Return the order in which the row to take comes first among rows with the same id."""
    if keep == ANY:
        return MESSAGE_ID
    return f"{MESSAGE_ID}, {ROW_ORDER} {'DESC' if is_latest(keep) else 'ASC'} NULLS LAST"


def hold_fresh() -> str:
    """Return SQL that keeps the events of ``fresh_event`` in a separate table."""
    return (
        f"CREATE TEMPORARY TABLE {HELD_EVENT} ON COMMIT DROP AS TABLE {FRESH_EVENT}; "
        f"CREATE UNIQUE INDEX txbox_held_ids ON {HELD_EVENT} ({MESSAGE_ID}); ANALYZE {HELD_EVENT} ({MESSAGE_ID})"
    )


def fill_from_held(columns: Sequence[EventColumn]) -> str:
    """Return SQL that puts the held events with these ids into ``fresh_event``, sorted."""
    return _fill_from_held(columns, f"{MESSAGE_ID} = ANY(%(message_ids)s)")


def fill_good(columns: Sequence[EventColumn]) -> str:
    """Return SQL that puts the held events up to an id, without the refused ones, into ``fresh_event``, sorted."""
    # Not <> ALL, because Postgres does not hash it before version 15.
    return _fill_from_held(
        columns, f"{MESSAGE_ID} <= %(last_id)s AND {MESSAGE_ID} NOT IN (SELECT unnest(%(refused)s::text[]))"
    )


def _fill_from_held(columns: Sequence[EventColumn], which: str) -> str:
    names = ", ".join([MESSAGE_ID, *(quote(one.name) for one in _sent(columns))])
    return f"INSERT INTO {FRESH_EVENT} ({names}) SELECT {names} FROM {HELD_EVENT} WHERE {which} ORDER BY {MESSAGE_ID}"  # noqa: S608


def held_ids() -> str:
    """Return a query for the ids of all held events, sorted."""
    return f"SELECT {MESSAGE_ID} FROM {HELD_EVENT} ORDER BY {MESSAGE_ID}"  # noqa: S608 - names of ours


def held_rows() -> str:
    """Return a query for the held events with these ids as JSON, sorted."""
    return (
        f"SELECT {MESSAGE_ID}, to_jsonb(held)::text FROM {HELD_EVENT} AS held "  # noqa: S608 - names of ours
        f"WHERE {MESSAGE_ID} = ANY(%(message_ids)s) ORDER BY {MESSAGE_ID}"
    )


def held_suspect() -> str:
    """Return a query for the held event, among these ids, whose values make up most of a quoted text.

    It returns no row if the text quotes none of them.
    """
    values = "jsonb_each_text(to_jsonb(held)) WHERE strpos(%(quoted)s, value) > 0"
    return (
        f"SELECT {MESSAGE_ID} FROM (SELECT {MESSAGE_ID}, (SELECT sum(length(value)) FROM {values}) AS characters "  # noqa: S608 - names of ours
        f"FROM {HELD_EVENT} AS held WHERE {MESSAGE_ID} = ANY(%(message_ids)s)) AS held "
        f"WHERE characters > 0 ORDER BY characters DESC, {MESSAGE_ID} LIMIT 1"
    )


def drop_refused() -> str:
    """Return SQL that deletes the refused events from ``fresh_event``, and returns their ids."""
    return f"DELETE FROM {FRESH_EVENT} WHERE {MESSAGE_ID} = ANY(%(message_ids)s) RETURNING {MESSAGE_ID}"  # noqa: S608


def drop_expired(sent_at: str | None, behind_horizon: str) -> str:
    """Return SQL that deletes the events sent before the horizon, and returns their count and some of their ids.

    An event's time is the time in an id that is a UUID of version 7, as ``txbox.messages.message.time_of_id`` reads it,
    or that of the column ``sent_at``, whichever is earlier. An event without either is of unknown age, and stays.
    ``behind_horizon`` is from chunk_merger.sql.
    """
    column = "NULL::timestamptz" if sent_at is None else f"event.{quote(sent_at)}"
    return (
        f"WITH expired AS (DELETE FROM {FRESH_EVENT} AS event USING {behind_horizon} "  # noqa: S608 - quoted
        f"AND least({_TIME_OF_ID}, CASE WHEN {column} >= {_EARLIEST} THEN {column} END) < horizon.horizon "
        f"RETURNING event.{MESSAGE_ID}) SELECT count(*), (array_agg({MESSAGE_ID}))[1:{SHOWN_EXPIRED}] FROM expired"
    )


def staged_columns(columns: Sequence[EventColumn]) -> str:
    """Return the columns of a staging table, for CREATE TABLE."""
    return ", ".join([_ID, *(f"{one.staged_as} {one.postgres_type}" for one in _sent(columns))])


def quote_text(text: str) -> str:
    """Return a text quoted for Postgres, and escaped for psycopg's placeholders."""
    return psycopg_sql.Literal(text).as_string(None).replace("%", "%%")


def _sent(columns: Sequence[EventColumn]) -> list[EventColumn]:
    """Return the columns that are sent besides the id."""
    return [one for one in columns if one.staged_as != MESSAGE_ID]


_EARLIEST = "timestamptz '2015-01-01 00:00:00Z'"
_UUID_7 = (
    "^(urn:uuid:)?([0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    "|[0-9a-f]{12}7[0-9a-f]{3}[89ab][0-9a-f]{15})$"
)
_HEXADECIMAL = f"translate(regexp_replace(event.{MESSAGE_ID}, '^urn:uuid:', '', 'i'), '-', '')"
_MADE_AT = f"to_timestamp(('x' || left({_HEXADECIMAL}, 12))::bit(48)::bigint / 1000.0)"
_TIME_OF_ID = (
    f"CASE WHEN event.{MESSAGE_ID} ~* '{_UUID_7}' THEN CASE WHEN {_MADE_AT} >= {_EARLIEST} THEN {_MADE_AT} END END"
)
_ID = f'{MESSAGE_ID} text COLLATE "C" NOT NULL'


def csv_lines(batch: "pyarrow.RecordBatch") -> memoryview:
    """Return the rows of a batch as lines of CSV in UTF-8."""
    columns = [as_text(one) if _has_zone(one) else one for one in batch.columns]
    lines = pyarrow.BufferOutputStream()
    options = csv.WriteOptions(include_header=False, quoting_style="needed")  # quotes all texts
    csv.write_csv(pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names), lines, options)
    return memoryview(lines.getvalue())


def as_text(column: "pyarrow.Array") -> "pyarrow.StringArray":
    """Return a column's values as they are written in CSV, but without quotes."""
    if _has_zone(column):
        # Arrow stores times in UTC, whatever the zone. Looking the zone up for each value takes fifty times as long.
        local = column.cast(pyarrow.int64()).cast(pyarrow.timestamp(column.type.unit))
        return compute.binary_join_element_wise(local.cast(pyarrow.string()), "Z", "")
    return column.cast(pyarrow.string())


def _has_zone(column: "pyarrow.Array") -> bool:
    return pyarrow.types.is_timestamp(column.type) and column.type.tz is not None
