"""Every SQL statement of the library: named, pure, in one place.

A statement is built once for one set of tables and then only executed: building it costs Python more time than
running it costs Postgres. Values are always bound (``%s`` is psycopg's placeholder); names are quoted by
SQLAlchemy.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from sqlalchemy import RowMapping, Table
from sqlalchemy.dialects.postgresql.psycopg import dialect as psycopg_dialect

from txbox.schema import tables

__all__ = [
    "BACKEND_PID",
    "SESSIONS_AT_WORK",
    "Statements",
    "literal",
    "microseconds",
    "moment",
    "quoted",
    "read_nothing",
    "statements",
    "text_array",
    "with_moments",
]


BACKEND_PID = "SELECT pg_backend_pid()"
"""The process id of the server that answers; behind a pooler not the one that the connection was told."""


SESSIONS_AT_WORK = """
SELECT pid FROM pg_stat_activity
WHERE pid = ANY(%s::int[])
  AND (
    wait_event IS DISTINCT FROM 'ClientRead' OR clock_timestamp() - state_change < make_interval(secs => %s)
  ) IS NOT FALSE"""
"""Which of these server processes are at work for their clients: (process ids, seconds) → rows. One that has been
waiting for its client's next word for so many seconds is not; nor is one that has ended."""


BLOCKED_LOADS = """
WITH of_run AS (
  SELECT pid, lpad(to_hex((classid::bigint & 65535) << 32 | objid::bigint), 12, '0') AS run_id
  FROM pg_locks
  WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND classid::bigint >> 16 = %s
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
SELECT waiting.run_id, waiting.pid,
  extract(epoch FROM clock_timestamp() - waiter.query_start)::float8 AS seconds,
  blocker.pid AS blocker_pid, holding.run_id AS blocker_run_id, activity.usename AS blocker_owner,
  activity.state AS blocker_state,
  extract(epoch FROM clock_timestamp() - activity.xact_start)::float8 AS blocker_seconds
FROM of_run AS waiting
CROSS JOIN LATERAL (SELECT DISTINCT unnest(pg_blocking_pids(waiting.pid))) AS blocker (pid)
LEFT JOIN of_run AS holding ON holding.pid = blocker.pid
LEFT JOIN pg_stat_activity AS waiter ON waiter.pid = waiting.pid
LEFT JOIN pg_stat_activity AS activity ON activity.pid = blocker.pid
WHERE %s::text IS NULL OR waiting.run_id = %s
ORDER BY seconds DESC NULLS LAST, waiting.run_id, waiting.pid, blocker.pid"""
"""Who waits for whom: (tag, run or null, the same)."""


class Statements:
    """The statements for the tables in one schema, under one prefix."""

    def __init__(self, schema: str | None, prefix: str) -> None:
        described = self.tables = tables(schema, prefix)
        processed = quoted(described.processed_message)
        failure = quoted(described.message_failure)
        letter = quoted(described.dead_letter)
        conflict = quoted(described.handler_conflict)

        # -- inbox ------------------------------------------------------------------------------------------------
        #
        # One statement does three things, in an order that the data flow forces:
        #
        #   bound     remembers the transaction's lock_timeout and sets ours;
        #   recorded  needs a row of bound, so it inserts under our timeout. Against a row of a transaction that
        #             has not ended, ON CONFLICT waits for that transaction: this is the wait that is bounded;
        #   SELECT    needs the count of recorded, so it puts the old lock_timeout back last, whatever was inserted.
        #
        # set_config(…, true) is local to the transaction, so nothing leaks through a transaction-mode pooler, and a
        # timeout (55P03) aborts the transaction, which undoes the setting as well.

        self.record_one = f"""
WITH bound AS MATERIALIZED (
  SELECT current_setting('lock_timeout') AS before, set_config('lock_timeout', %s, true)
), recorded AS (
  INSERT INTO {processed} (subscriber_id, message_id, fingerprint)
  SELECT %s::text, %s::text, %s::bytea FROM bound
  ON CONFLICT DO NOTHING
  RETURNING message_id
)
SELECT found.first, set_config('lock_timeout', bound.before, true), pg_backend_pid()
FROM bound, (SELECT count(*) AS first FROM recorded) AS found"""
        """Record one id: (lock timeout, subscriber, id, fingerprint) → 1 if it is first, else 0; and last the
        server's process id."""

        self.record_many = f"""
WITH bound AS MATERIALIZED (
  SELECT current_setting('lock_timeout') AS before, set_config('lock_timeout', %s, true)
), recorded AS (
  INSERT INTO {processed} (subscriber_id, message_id, fingerprint)
  SELECT %s::text, message.id, message.fingerprint
  FROM bound, unnest(%s::text[], %s::bytea[]) AS message (id, fingerprint)
  ON CONFLICT DO NOTHING
  RETURNING message_id
)
SELECT found.first, set_config('lock_timeout', bound.before, true), pg_backend_pid()
FROM bound, (SELECT array_agg(message_id) AS first FROM recorded) AS found"""
        """Record many ids, given sorted: (lock timeout, subscriber, ids, fingerprints) → the ids that are first;
        and last the server's process id."""

        self.fingerprints = f"""
SELECT message_id, fingerprint FROM {processed}
WHERE subscriber_id = %s AND message_id = ANY(%s::text[])"""
        """The fingerprints of ids that were found to be duplicates: (subscriber, ids) → rows."""

        self.find_parked = f"""
SELECT message_id, fingerprint FROM {processed}
WHERE subscriber_id = %s AND message_id = ANY(%s::text[]) AND dead_letter_id IS NOT NULL"""
        """Which ids that were found to be duplicates are parked: (subscriber, ids) → rows."""

        self.unrecord = f"""
DELETE FROM {processed}
WHERE subscriber_id = %s AND message_id = ANY(%s::text[]) AND xmin = pg_current_xact_id()::xid"""
        """Take back what this transaction has recorded: (subscriber, ids). Not what a savepoint of it has: that is a
        transaction of its own, for Postgres."""

        # -- failures ---------------------------------------------------------------------------------------------

        one_more = f"""
ON CONFLICT (subscriber_id, message_id) DO UPDATE
SET attempts = failure.attempts + 1, error = excluded.error, last_failed_at = now(), history = excluded.history ||
  CASE WHEN jsonb_array_length(failure.history) < {MAX_HISTORY} THEN failure.history ELSE failure.history - -1 END
RETURNING attempts, history"""

        self.begin_attempt = f"""
INSERT INTO {failure} AS failure (subscriber_id, message_id, attempts, error, history)
SELECT candidate.subscriber_id, candidate.message_id, 1, candidate.error, candidate.history
FROM (
  SELECT %s::text, %s::text, %s::text, jsonb_build_array(jsonb_build_object('at', now()) || %s::jsonb)
) AS candidate (subscriber_id, message_id, error, history)
WHERE NOT EXISTS (
  SELECT FROM {processed} AS processed
  WHERE processed.subscriber_id = candidate.subscriber_id AND processed.message_id = candidate.message_id
){one_more}, extract(epoch FROM now() - (history -> 1 ->> 'at')::timestamptz)::double precision"""
        """Count an attempt before it is made: (subscriber, id, error, the attempt as JSON) → attempts, those that
        counted, newest first, and the age in seconds of the one before; no row if the message is already processed or
        parked."""

        self.count_failure = f"""
INSERT INTO {failure} AS failure (subscriber_id, message_id, attempts, error, history)
VALUES (%s, %s, 1, %s, jsonb_build_array(jsonb_build_object('at', now()) || %s::jsonb)){one_more}"""
        """Count an attempt that has failed: (subscriber, id, error, the attempt as JSON) → attempts, those that
        counted."""

        self.lock_failure = f"""
SELECT attempts, error, history FROM {failure} WHERE subscriber_id = %s AND message_id = %s FOR UPDATE"""
        """The attempts of a message, locked: (subscriber, id) → attempts, the last error, those that counted."""

        self.write_failure = f"""
UPDATE {failure} SET attempts = %s, error = %s, history = %s::jsonb, last_failed_at = now()
WHERE subscriber_id = %s AND message_id = %s"""
        """Write down the attempts of a locked message: (attempts, error, those that counted, subscriber, id)."""

        self.attempts = f"SELECT attempts FROM {failure} WHERE subscriber_id = %s AND message_id = %s"
        """Attempts so far: (subscriber, id) → attempts; no row if there were none."""

        self.forget_failures = f"DELETE FROM {failure} WHERE subscriber_id = %s AND message_id = ANY(%s::text[])"
        """Forget the failures of messages that have succeeded or are parked: (subscriber, ids)."""

        # -- conflicts --------------------------------------------------------------------------------------------

        self.count_conflicts = f"""
INSERT INTO {conflict} AS known (subscriber_id, sqlstate, place, conflicts) VALUES (%s, %s, %s, %s)
ON CONFLICT (subscriber_id, sqlstate, place) DO UPDATE
SET conflicts = known.conflicts + excluded.conflicts, last_at = now()"""
        """Count transactions that were rolled back for others' sake: (subscriber, SQLSTATE, relation, how many)."""

        self.conflicts = f"""
SELECT subscriber_id, sqlstate, place, conflicts, {microseconds("first_at")} AS first_at,
  {microseconds("last_at")} AS last_at
FROM {conflict} AS known ORDER BY known.last_at DESC, subscriber_id, sqlstate, place LIMIT %s"""
        """The latest conflicts first: (limit) → rows."""

        # -- dead letters -----------------------------------------------------------------------------------------

        self.park = f"""
INSERT INTO {letter} AS parked (
  subscriber_id, message_id, reason, error, attempts, source, body, body_hash, headers, envelope, history,
  lease_attempts
)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s::jsonb, %s::jsonb, %s::jsonb, %s)
ON CONFLICT (subscriber_id, message_id, body_hash) WHERE redriven_at IS NULL
DO UPDATE SET error = excluded.error
RETURNING dead_letter_id"""
        """Park a dead letter, once: every column in order → its id, also when it was parked before."""

        self.bound_wait = "SELECT set_config('lock_timeout', %s, true)"
        """Wait for locks no longer than this, in this transaction: (interval)."""

        self.mark_parked = f"""
INSERT INTO {processed} (subscriber_id, message_id, fingerprint, dead_letter_id) VALUES (%s, %s, %s, %s)
ON CONFLICT DO NOTHING"""
        """Have the inbox know that a message is parked: (subscriber, id, fingerprint, letter) → a row, or none if the
        inbox has the message. It waits for a transaction that processes the message."""

        self.find_recorded = f"""
SELECT fingerprint, dead_letter_id FROM {processed} WHERE subscriber_id = %s AND message_id = %s"""
        """What the inbox knows of a message: (subscriber, id) → fingerprint, and the letter if it is parked."""

        self.unmark_parked = f"""
DELETE FROM {processed} WHERE subscriber_id = %s AND message_id = %s AND dead_letter_id IS NOT NULL"""
        """Have the inbox know no more that a message is parked, for it is sent through again: (subscriber, id)."""

        self.call_mismatch = f"""
UPDATE {letter} SET reason = 'mismatch'
WHERE subscriber_id = %s AND message_id = %s AND dead_letter_id <> %s AND redriven_at IS NULL"""
        """Say of a message's other letters that another body of it goes on: (subscriber, id, the one that does)."""

        self.waits_parked = f"""
UPDATE {letter} AS letter SET lease_attempts = greatest(letter.lease_attempts, %s)
WHERE letter.dead_letter_id = (
  SELECT waiting.dead_letter_id FROM {letter} AS waiting
  WHERE waiting.subscriber_id = %s AND waiting.message_id = %s AND waiting.body_hash = %s
    AND waiting.redriven_at IS NULL
  FOR UPDATE SKIP LOCKED
)"""
        """Whether a message of a ledger waits as a dead letter: (its attempts in the ledger, subscriber, id, SHA-256 of
        the body) → a row if it does.

        One that is locked is being redriven, so it waits no more: its copy may be the very delivery that asks.

            redrive   locks the letter, sends ──────────────────────── redriven_at = now(), commits
            worker             receives the copy, fails, asks: parked? were it yes, it would ack the only copy
        """

        self.lease_attempts = f"""
SELECT max(lease_attempts) FROM {letter} WHERE subscriber_id = %s AND message_id = %s"""
        """How many attempts a message had in its ledger when it was parked last: (subscriber, id) → attempts or null.
        Also by a letter that is being redriven."""

        columns = (
            "dead_letter_id, subscriber_id, message_id, reason, error, attempts, source, body, headers, envelope, "
            f"{microseconds('parked_at')} AS parked_at, {microseconds('redriven_at')} AS redriven_at, history"
        )
        self.letters = f"""
SELECT {columns} FROM {letter}
WHERE (%s::text IS NULL OR subscriber_id = %s) AND (%s OR redriven_at IS NULL) AND dead_letter_id > %s
ORDER BY dead_letter_id LIMIT %s"""
        """A page of dead letters: (subscriber or null, the same, with redriven ones, after id, limit) → rows."""

        self.letter = f"SELECT {columns} FROM {letter} WHERE dead_letter_id = %s"
        """One dead letter: (id) → row."""

        self.lock_letters = f"""
SELECT {columns} FROM {letter}
WHERE dead_letter_id = ANY(ARRAY(
  SELECT waiting.dead_letter_id FROM {letter} AS waiting JOIN {letter} AS this USING (subscriber_id, message_id)
  WHERE this.dead_letter_id = %s AND waiting.redriven_at IS NULL
) || %s::bigint)
ORDER BY dead_letter_id FOR UPDATE"""
        """A dead letter and those that wait under the same id, locked until the transaction ends: (its number, the
        same) → rows. So two redrives do not both send it, and do not wait for each other in a circle."""

        self.mark_redriven = f"UPDATE {letter} SET redriven_at = now() WHERE dead_letter_id = %s"
        """Say that a dead letter was sent through again: (id)."""

        # -- status -----------------------------------------------------------------------------------------------

        self.inbox_estimate = "SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = %s::regclass"
        """How many rows the inbox has, by the planner's figures: (quoted table name) → rows."""

        self.inbox_counts = f"""
SELECT subscriber_id, count(*) FILTER (WHERE dead_letter_id IS NULL),
  {microseconds("max(processed_at) FILTER (WHERE dead_letter_id IS NULL)")}
FROM {processed} GROUP BY subscriber_id ORDER BY subscriber_id"""
        """Exact figures per subscriber, by reading the whole inbox: messages processed, and when the last one was."""

        self.failure_counts = f"""
SELECT subscriber_id, count(*) FROM {failure} AS failure
WHERE NOT EXISTS (
  SELECT FROM {processed} AS processed
  WHERE processed.subscriber_id = failure.subscriber_id AND processed.message_id = failure.message_id
)
GROUP BY subscriber_id ORDER BY subscriber_id"""
        """Messages that wait for another attempt, per subscriber; one that a re-send has brought home does not."""

        self.letter_counts = f"""
SELECT subscriber_id, reason, count(*), {microseconds("min(parked_at)")} FROM {letter} WHERE redriven_at IS NULL
GROUP BY subscriber_id, reason ORDER BY subscriber_id, reason"""
        """Dead letters that wait for a person, per subscriber and reason."""

        # Quoted and with their schema: for messages, and to look them up in the catalogue.
        self.processed_message = processed.replace("%%", "%")
        self.message_failure = failure.replace("%%", "%")
        self.dead_letter = letter.replace("%%", "%")
        self.handler_conflict = conflict.replace("%%", "%")


MAX_HISTORY = 20
"""Of the attempts that counted, so many are kept in detail: the last ones."""


@lru_cache(maxsize=64)
def statements(schema: str | None = None, prefix: str = "") -> Statements:
    """Return the statements for one place; the same object for the same arguments."""
    return Statements(schema, prefix)


def text_array(values: Sequence[str]) -> str | Sequence[str]:
    """Return values as what is quickest to bind to ``%s::text[]``.

    That is the array's literal, written with one join: psycopg looks at the elements of a list one by one, which takes
    1,000 ids 0.7 ms instead of 0.04. Values that would need an escape are left to psycopg.
    https://www.postgresql.org/docs/current/arrays.html#ARRAYS-IO
    """
    joined = '","'.join(values)
    if not values or "\\" in joined or joined.count('"') != 2 * (len(values) - 1):
        return values
    return f'{{"{joined}"}}'


def microseconds(time: str) -> str:
    """Return SQL for a time as microseconds since 1970, for ``moment``; null if it is infinite.

    How a server writes a time, and whether psycopg can read it, hangs on the session's DateStyle, which a database, a
    role or a handler may set. A number has one form.

    Args:
        time: an SQL expression, a timestamp with time zone.
    """
    return f"CASE WHEN isfinite({time}) THEN (extract(epoch FROM {time}) * 1000000)::bigint END"


def moment(microseconds: int | None) -> datetime | None:
    """Return what ``microseconds`` selected, in UTC; None for null, and for years that Python does not have."""
    try:
        return None if microseconds is None else _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        return None


def with_moments(row: RowMapping, *names: str) -> dict[str, Any]:
    """Return a row whose columns of these names, which ``microseconds`` selected, are times."""
    return {**row, **{name: moment(row[name]) for name in names}}


def read_nothing(table: Table) -> str:
    """Return a statement that fails if a table is not there, lacks a column, or is not ours to read."""
    columns = ", ".join(_PREPARER.quote(column.name) for column in table.columns)
    return f"SELECT {columns} FROM {quoted(table)} LIMIT 0"


def literal(name: str) -> str:
    """Return a quoted name as the inside of a string, for ``'…'::regclass``."""
    return name.replace("'", "''")


def quoted(table: Table) -> str:
    """Return the table's name, quoted as Postgres and psycopg's placeholders need it."""
    return str(_PREPARER.format_table(table))


_PREPARER = psycopg_dialect().identifier_preparer  # type: ignore[no-untyped-call]


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
