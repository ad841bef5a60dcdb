"""Every SQL statement of the watermarks: named, pure, in one place; ``txbox.postgres.sql`` has the inbox's.

Three habits that all of them share:

- ``txbox_bound`` sets our lock_timeout, and the outer SELECT puts the old one back last: as in ``record_one``.
- An event that the statement's own snapshot knows to be stale locks nothing, waits for nothing and writes nothing. A
  watermark only rises, so what is stale in an older snapshot is stale.
- Aggregates are inserted in one order, that of their bytes, whether their rows are there or not. Two statements that
  overlap wait for each other in that order, never in a circle. That is why no statement here first locks the rows that
  it finds and then inserts the others.

Against a row of a transaction that has not ended, ON CONFLICT waits; that is the wait that is bounded. At READ
COMMITTED its WHERE is then held against the newest version of the row; with one snapshot for the transaction, a version
that the snapshot cannot see ends in 40001.
"""

from functools import lru_cache

from sqlalchemy.dialects.postgresql.psycopg import dialect as psycopg_dialect

from txbox.postgres.sql import quoted
from txbox.schema import tables

__all__ = ["WatermarkStatements", "watermark_statements"]

_BOUND = """txbox_bound AS MATERIALIZED (
  SELECT current_setting('lock_timeout') AS before, set_config('lock_timeout', %s, true)
)"""

_KEY = "subscriber_id, aggregate_type, aggregate_id"
_HIGHEST = f"{2**63 - 1}::bigint"


class WatermarkStatements:
    """The statements for the watermarks in one schema, under one prefix."""

    def __init__(self, schema: str | None, prefix: str) -> None:
        described = tables(schema, prefix).aggregate_watermark
        watermark = quoted(described)

        # -- one event --------------------------------------------------------------------------------------------

        event = f"""txbox_event AS MATERIALIZED (
  SELECT %s::text AS subscriber_id, %s::text AS aggregate_type, %s::text AS aggregate_id, %s::bigint AS sequence
), txbox_known AS MATERIALIZED (
  SELECT mark.sequence FROM {watermark} AS mark JOIN txbox_event AS event USING ({_KEY})
)"""
        unless_stale = """WHERE NOT EXISTS (SELECT FROM txbox_known AS known WHERE known.sequence >= event.sequence)"""

        self.advance = f"""
WITH {_BOUND}, {event}, txbox_advanced AS (
  INSERT INTO {watermark} AS mark ({_KEY}, sequence)
  SELECT {_KEY}, sequence FROM txbox_bound, txbox_event AS event
  {unless_stale}
  ON CONFLICT ({_KEY}) DO UPDATE
  SET sequence = excluded.sequence, sequence_before = mark.sequence, advanced_at = excluded.advanced_at
  WHERE mark.sequence < excluded.sequence
  RETURNING sequence
)
SELECT found.applied, set_config('lock_timeout', bound.before, true)
FROM txbox_bound AS bound, (SELECT count(*) AS applied FROM txbox_advanced) AS found"""
        """Advance one watermark: (lock timeout, subscriber, type, id, sequence) → 1 if it is applied, else 0."""

        # Where there is no watermark, only ``first`` may make one; but only an INSERT waits for another that is just
        # making one. So any other sequence inserts a placeholder, ``first - 1``, which our next statement deletes. It
        # is known by its sequence_before, the highest bigint, from which no watermark can have risen.
        self.advance_next = f"""
WITH {_BOUND}, {event}, txbox_advanced AS (
  INSERT INTO {watermark} AS mark ({_KEY}, sequence, sequence_before)
  SELECT {_KEY}, coalesce(placeholder.sequence, event.sequence),
    CASE WHEN placeholder.sequence IS NOT NULL THEN {_HIGHEST} END
  FROM txbox_bound, txbox_event AS event, (SELECT %s::bigint AS sequence) AS placeholder
  {unless_stale}
  ON CONFLICT ({_KEY}) DO UPDATE
  SET sequence = %s::bigint, sequence_before = mark.sequence, advanced_at = excluded.advanced_at
  WHERE mark.sequence = %s::bigint
  RETURNING sequence_before IS NOT DISTINCT FROM {_HIGHEST} AS placed
)
SELECT found.applied, found.placed, (SELECT sequence FROM txbox_known),
  set_config('lock_timeout', bound.before, true)
FROM txbox_bound AS bound, (
  SELECT count(*) FILTER (WHERE NOT placed) AS applied, count(*) FILTER (WHERE placed) AS placed FROM txbox_advanced
) AS found"""
        """Advance one watermark by one: (lock timeout, subscriber, type, id, sequence, the placeholder if the sequence
        is not the first one, else null, sequence, sequence - 1) → 1 if it is applied, 1 if a placeholder was inserted,
        and the watermark that the snapshot had."""

        key = "subscriber_id = %s AND aggregate_type = %s AND aggregate_id = %s"

        self.drop_placeholder = f"DELETE FROM {watermark} WHERE {key} AND sequence_before = {_HIGHEST}"
        """Leave no watermark where there was none: (subscriber, type, id)."""

        self.sequence = f"SELECT sequence FROM {watermark} WHERE {key}"
        """The watermark: (subscriber, type, id) → its sequence, if there is one."""

        # -- many events ------------------------------------------------------------------------------------------

        wanted = f"""FROM txbox_bound, unnest(%s::text[], %s::text[], %s::bigint[])
    AS wanted (aggregate_type, aggregate_id, sequence)
  WHERE NOT EXISTS (
    SELECT FROM {watermark} AS known
    WHERE known.subscriber_id = %s AND known.aggregate_type = wanted.aggregate_type
      AND known.aggregate_id = wanted.aggregate_id AND known.sequence >= wanted.sequence
  )
  ORDER BY wanted.aggregate_type COLLATE "C", wanted.aggregate_id COLLATE "C"
  ON CONFLICT ({_KEY}) DO UPDATE"""

        self.advance_many = f"""
WITH {_BOUND}, txbox_advanced AS (
  INSERT INTO {watermark} AS mark ({_KEY}, sequence)
  SELECT %s::text, wanted.aggregate_type, wanted.aggregate_id, wanted.sequence
  {wanted}
  SET sequence = excluded.sequence, sequence_before = mark.sequence, advanced_at = excluded.advanced_at
  WHERE mark.sequence < excluded.sequence
  RETURNING aggregate_type, aggregate_id, sequence_before
)
SELECT found.types, found.ids, found.before, set_config('lock_timeout', bound.before, true)
FROM txbox_bound AS bound, (
  SELECT array_agg(aggregate_type) AS types, array_agg(aggregate_id) AS ids, array_agg(sequence_before) AS before
  FROM txbox_advanced
) AS found"""
        """Advance watermarks to the highest sequence of each aggregate: (lock timeout, subscriber, types, ids,
        sequences, subscriber) → of those that rose, types, ids, and their sequences before, null if there was none."""

        self.hold_many = f"""
WITH {_BOUND}, txbox_held AS (
  INSERT INTO {watermark} AS mark ({_KEY}, sequence, sequence_before)
  SELECT %s::text, wanted.aggregate_type, wanted.aggregate_id, %s::bigint, {_HIGHEST}
  {wanted}
  SET sequence = mark.sequence
  RETURNING aggregate_type, aggregate_id,
    CASE WHEN sequence_before IS DISTINCT FROM {_HIGHEST} THEN sequence END AS sequence
)
SELECT found.types, found.ids, found.sequences, set_config('lock_timeout', bound.before, true)
FROM txbox_bound AS bound, (
  SELECT array_agg(aggregate_type) AS types, array_agg(aggregate_id) AS ids, array_agg(sequence) AS sequences
  FROM txbox_held
) AS found"""
        """Lock watermarks, and read them as they are then; a placeholder stands where there is none: (lock timeout,
        subscriber, placeholder, types, ids, highest sequences, subscriber) → types, ids, sequences or
        null. Those to which all is stale are left out. DO UPDATE changes nothing here, but only then does RETURNING
        have the row: what the snapshot has may be older."""

        self.settle_many = f"""
WITH txbox_decided AS MATERIALIZED (
  SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[])
    AS decided (aggregate_type, aggregate_id, before, after)
), txbox_moved AS (
  UPDATE {watermark} AS mark SET sequence = decided.after, sequence_before = decided.before, advanced_at = now()
  FROM txbox_decided AS decided
  WHERE mark.subscriber_id = %s AND mark.aggregate_type = decided.aggregate_type
    AND mark.aggregate_id = decided.aggregate_id AND decided.after IS NOT NULL
)
DELETE FROM {watermark} AS mark USING txbox_decided AS decided
WHERE mark.subscriber_id = %s AND mark.aggregate_type = decided.aggregate_type
  AND mark.aggregate_id = decided.aggregate_id AND decided.after IS NULL"""
        """Move watermarks that are held, and leave none where there was none: (types, ids, sequences before or null,
        sequences after, or null for a placeholder that goes, subscriber, subscriber)."""

        # Quoted and with its schema, and as an error names it: for messages.
        self.aggregate_watermark = watermark.replace("%%", "%")
        self.name = described.name
        self._watermark = watermark

    def advance_from(
        self, relation: str, type_column: str | None, id_column: str, sequence_column: str, *, newest_only: bool
    ) -> str:
        """Advance watermarks by the events of a table, and delete from it those that are not above them.

        (lock timeout or null for the transaction's own, the type unless a column has it, subscriber, subscriber) → how
        many events are left.

        Events of one aggregate count in the order of their sequences, so that of two with the same sequence one is
        left. A sequence that is null makes the one that is inserted null, which the table refuses: nothing is lost
        silently.

        Args:
            relation: the table, by its name alone; a temporary one comes first.
            type_column: the column of the aggregate's type; None: it is given as a value.
            id_column: the column of the aggregate's id.
            sequence_column: the column of the sequence.
            newest_only: of the events above a watermark, leave only the newest of each aggregate.
        """
        table = quote(relation)
        kind = "%s::text" if type_column is None else f"event.{quote(type_column)}::text"
        distinct, order = ("", " DESC") if newest_only else (", event.sequence", "")
        return f"""
WITH txbox_bound AS MATERIALIZED (
  SELECT current_setting('lock_timeout') AS before,
    set_config('lock_timeout', coalesce(%s::text, current_setting('lock_timeout')), true)
), txbox_event AS MATERIALIZED (
  SELECT event.ctid AS place, ({kind}) COLLATE "C" AS aggregate_type,
    (event.{quote(id_column)}::text) COLLATE "C" AS aggregate_id, event.{quote(sequence_column)}::bigint AS sequence
  FROM {table} AS event
), txbox_newest AS (
  SELECT aggregate_type, aggregate_id, CASE WHEN count(*) = count(sequence) THEN max(sequence) END AS sequence
  FROM txbox_event GROUP BY aggregate_type, aggregate_id
), txbox_advanced AS (
  INSERT INTO {self._watermark} AS mark ({_KEY}, sequence)
  SELECT %s::text, newest.aggregate_type, newest.aggregate_id, newest.sequence
  FROM txbox_bound, txbox_newest AS newest
  WHERE NOT EXISTS (
    SELECT FROM {self._watermark} AS known
    WHERE known.subscriber_id = %s AND known.aggregate_type = newest.aggregate_type
      AND known.aggregate_id = newest.aggregate_id AND known.sequence >= newest.sequence
  )
  ORDER BY newest.aggregate_type, newest.aggregate_id
  ON CONFLICT ({_KEY}) DO UPDATE
  SET sequence = excluded.sequence, sequence_before = mark.sequence, advanced_at = excluded.advanced_at
  WHERE mark.sequence < excluded.sequence
  RETURNING aggregate_type, aggregate_id, sequence_before
), txbox_left AS MATERIALIZED (
  SELECT DISTINCT ON (event.aggregate_type, event.aggregate_id{distinct}) event.place
  FROM txbox_event AS event JOIN txbox_advanced AS advanced USING (aggregate_type, aggregate_id)
  WHERE advanced.sequence_before IS NULL OR event.sequence > advanced.sequence_before
  ORDER BY event.aggregate_type, event.aggregate_id, event.sequence{order}
), txbox_dropped AS (
  DELETE FROM {table} AS event
  WHERE NOT EXISTS (SELECT FROM txbox_left WHERE txbox_left.place = event.ctid)
)
SELECT found.events, set_config('lock_timeout', bound.before, true)
FROM txbox_bound AS bound, (SELECT count(*) AS events FROM txbox_left) AS found"""


@lru_cache(maxsize=64)
def watermark_statements(schema: str | None = None, prefix: str = "") -> WatermarkStatements:
    """Return the statements for one place; the same object for the same arguments."""
    return WatermarkStatements(schema, prefix)


def quote(name: str) -> str:
    """Return a name, quoted as Postgres and psycopg's placeholders need it."""
    return str(_PREPARER.quote_identifier(name))


_PREPARER = psycopg_dialect().identifier_preparer  # type: ignore[no-untyped-call]
