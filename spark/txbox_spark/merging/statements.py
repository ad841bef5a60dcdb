"""Every SQL statement of a bulk load: named, pure, in one place.

Values are bound (``%s``), names are quoted by SQLAlchemy. Tables of ours that live for one transaction start with
``txbox_``, so that none of the caller's is hidden from the statements that apply the events; ``fresh_event`` is the
one that those statements are meant to see.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from psycopg import sql as psycopg_sql
from sqlalchemy import Table
from sqlalchemy.dialects.postgresql.psycopg import dialect as psycopg_dialect

from txbox.schema import tables
from txbox_spark.reading.columns import MESSAGE_ID, EventColumn

__all__ = ["FRESH", "LoadStatements", "in_one_statement", "load_statements", "quote"]

FRESH = "pg_temp.fresh_event"
"""The events of a chunk that are first: what the caller's statements apply, by its name alone."""


class LoadStatements:
    """The statements for the tables in one schema, under one prefix."""

    def __init__(self, schema: str | None, prefix: str) -> None:
        described = self.tables = tables(schema, prefix)
        run = _quoted(described.bulk_load)
        chunk = _quoted(described.bulk_load_chunk)
        processed = self._processed = _quoted(described.processed_message)
        letter = self._letter = _quoted(described.dead_letter)

        # -- the ledger -------------------------------------------------------------------------------------------

        self.begin_run = f"""
INSERT INTO {run} (
  run_id, subscriber_id, source, digest, content, writer, chunks, bounds, rows_read, rows_rejected, rejected_sample
)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s::jsonb, %s, %s, %s::jsonb)"""
        """Begin a run: every column in order; rows_rejected is null as long as only the chunks know."""

        self.read_run = f"""
SELECT subscriber_id, source, digest, content, writer, bounds, attempts, staging_table, rows_read, rows_rejected,
  rejected_sample, finished_at IS NOT NULL
FROM {run} WHERE run_id = %s"""
        """What a run was begun with, and how it stands: (run) → a row, if there is such a run."""

        self.begin_attempt = f"""
UPDATE {run} SET attempts = attempts + 1, heartbeat_at = now(), error = NULL WHERE run_id = %s RETURNING attempts"""
        """Begin another attempt: (run) → its number."""

        self.heartbeat = f"UPDATE {run} SET heartbeat_at = now() WHERE run_id = %s"
        """Say that a run is being worked on: (run)."""

        self.set_staging_table = f"UPDATE {run} SET staging_table = %s, heartbeat_at = now() WHERE run_id = %s"
        """Say that the staging table is complete, or gone: (its name or null, run)."""

        self.record_failure = f"""
UPDATE {run} SET error = %s, heartbeat_at = now() WHERE run_id = %s AND finished_at IS NULL"""
        """Say why an attempt is given up: (error, run)."""

        self.failure = f"SELECT error FROM {run} WHERE run_id = %s"
        """Why the attempt was given up: (run) → error, or null."""

        self.finish_run = f"""
UPDATE {run}
SET finished_at = now(), staging_table = NULL, error = NULL, rows_rejected = %s, rejected_sample = %s::jsonb
WHERE run_id = %s"""
        """Say that every chunk is merged: (rows rejected, a sample of those, run)."""

        self.forget_run = f"""
WITH chunks AS (DELETE FROM {chunk} WHERE run_id = %s)
DELETE FROM {run} WHERE run_id = %s"""
        """Forget a run and its chunks: (run, run)."""

        self.forget_abandoned = f"""
WITH left_behind AS (
  DELETE FROM {run}
  WHERE subscriber_id = %s
    AND (source ~ %s OR source ~ %s AND heartbeat_at < now() - make_interval(secs => %s))
  RETURNING run_id
), chunks AS (
  DELETE FROM {chunk} AS chunk
  WHERE chunk.run_id IN (SELECT run_id FROM left_behind)
    OR NOT EXISTS (SELECT FROM {run} AS run WHERE run.run_id = chunk.run_id)
)
SELECT run_id FROM left_behind"""
        """Forget runs that were left behind: (subscriber, pattern of sources that are nobody else's, pattern of sources
        that others may be loading, seconds without a heartbeat for these) → runs. A task may outlive its driver, and
        merge a chunk after the run was forgotten: such chunks go, too."""

        self.merged_chunks = f"SELECT chunk FROM {chunk} WHERE run_id = %s ORDER BY chunk"
        """The chunks that are merged: (run) → rows."""

        self.totals = f"""
SELECT count(*), coalesce(sum(rows_read), 0)::bigint, coalesce(sum(rows_rejected), 0)::bigint,
  coalesce(sum(already_processed), 0)::bigint, coalesce(sum(applied), 0)::bigint, coalesce(sum(parked), 0)::bigint
FROM {chunk} WHERE run_id = %s"""
        """What the merged chunks add up to: (run) → chunks, read, rejected, already processed, applied, parked."""

        self.rejected_samples = f"""
SELECT sample.event FROM {chunk} AS chunk, jsonb_array_elements_text(chunk.rejected_sample) AS sample (event)
WHERE chunk.run_id = %s AND chunk.rejected_sample IS NOT NULL ORDER BY chunk.chunk LIMIT %s"""
        """Rejected rows: (run, how many at most) → rows."""

        # -- one chunk --------------------------------------------------------------------------------------------

        self.prepare_session = """
SELECT set_config(name, '0', true) FROM pg_settings WHERE name IN ('statement_timeout', 'transaction_timeout')
UNION ALL
SELECT set_config(name, '10s', true) FROM pg_settings
WHERE name = 'client_connection_check_interval' AND current_setting('dynamic_shared_memory_type') <> 'windows'
UNION ALL
SELECT set_config('work_mem', %s, true)
UNION ALL
SELECT set_config('idle_in_transaction_session_timeout', %s, true)
UNION ALL
SELECT set_config('lock_timeout', %s, true)
UNION ALL
SELECT pg_advisory_xact_lock_shared(%s)::text"""
        """Settings for one transaction, and the lock that tells its run. A statement of a bulk load may take long, and
        so may all of them; a transaction that stands still is ended, and so is a statement of a client that is gone:
        (memory for each sort, longest idleness, longest wait for a lock, number of the run's lock)."""

        self.claim_chunk = f"INSERT INTO {chunk} (run_id, chunk) VALUES (%s, %s) ON CONFLICT DO NOTHING"
        """Claim a chunk: (run, chunk) → one row, or none if it is done. It waits for a transaction that has claimed the
        same chunk and has not ended: of two attempts, one merges, and the other finds it done."""

        self.settle_chunk = f"""
UPDATE {chunk}
SET rows_read = %s, rows_rejected = %s, already_processed = %s, applied = %s, parked = %s, rejected_sample = %s::jsonb,
  merged_at = clock_timestamp()
WHERE run_id = %s AND chunk = %s"""
        """Write down what a chunk came to, in the transaction that merges it."""

        self.record = f"INSERT INTO {processed} (subscriber_id, message_id) SELECT %s, message_id FROM {FRESH}"
        """Record the fresh events, which lie sorted: (subscriber). A race ends it with 23505."""

        self.record_raced = f"""
WITH first AS (
  INSERT INTO {processed} (subscriber_id, message_id) SELECT %s, message_id FROM {FRESH} ORDER BY message_id
  ON CONFLICT DO NOTHING
  RETURNING message_id
)
INSERT INTO pg_temp.txbox_recorded SELECT message_id FROM first"""
        """Record those of the fresh events that nobody else has recorded meanwhile: (subscriber)."""

        effects = "hashtextextended('txbox bulk load ' || %s::text, %s::regclass::oid::bigint)"

        self.lock_effects = f"""
SELECT pg_advisory_xact_lock({effects}), current_setting('role') AS role, current_setting('search_path') AS path,
  to_regclass('fresh_event') IS NOT DISTINCT FROM to_regclass('{FRESH}')"""
        """Wait until no other chunk of the subscriber applies its events: (subscriber, quoted name of the inbox) →
        nothing, role and search path, and whether the caller's statements see those: with pg_temp late in the search
        path, a table of the same name would hide them."""

        self.effects_holder = f"""
SELECT lock.pid, lock.virtualtransaction, activity.state
FROM pg_locks AS lock LEFT JOIN pg_stat_activity AS activity ON activity.pid = lock.pid
WHERE lock.locktype = 'advisory' AND lock.objsubid = 1 AND lock.granted
  AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (lock.classid::bigint << 32 | lock.objid::bigint) = {effects}"""
        """The chunk that applies its events: (subscriber, quoted name of the inbox) → its server process, its
        transaction, and the state of its session if this role may see it."""

        self._processed_in_range = f"""{processed} AS processed
WHERE processed.subscriber_id = %s AND processed.message_id = event.message_id
  AND processed.message_id >= %s AND (%s::text IS NULL OR processed.message_id < %s)"""

        self.drop_processed = f"DELETE FROM {FRESH} AS event USING {self._processed_in_range}"
        """Leave no event in ``fresh_event`` whose id is in the inbox. The primary key decides what is first; this only
        saves it the work. It looks at the chunk's own stretch of the inbox:
        (subscriber, first id of the chunk, first id beyond it or null, the same)."""

        self.count_unprocessed = f"""
SELECT count(*) FROM {FRESH} AS event WHERE NOT EXISTS (SELECT FROM {self._processed_in_range})"""
        """Count the events in ``fresh_event`` whose ids are not in the inbox: the same values. (To ask only whether
        there is one, with LIMIT or EXISTS, makes Postgres look up id after id, which takes three times as long.)"""

        self.any_parked = f"""
SELECT FROM {letter} WHERE subscriber_id = %s AND redriven_at IS NULL AND reason <> 'mismatch' LIMIT 1"""
        """Look for any dead letter of a subscriber that waits: (subscriber) → a row, if there is one."""

        self.find_processed = f"SELECT message_id FROM {processed} WHERE subscriber_id = %s AND message_id = ANY(%s)"
        """Look for ids in the inbox: (subscriber, ids) → those that are there."""

        self.any_processed = f"SELECT FROM {processed} WHERE subscriber_id = %s LIMIT 1"
        """Look for any id of a subscriber: (subscriber) → a row, if there is one."""

        self.some_subscribers = f"""
WITH RECURSIVE known AS (
  (SELECT subscriber_id FROM {processed} ORDER BY subscriber_id LIMIT 1)
  UNION ALL
  SELECT (
    SELECT processed.subscriber_id FROM {processed} AS processed
    WHERE processed.subscriber_id > known.subscriber_id ORDER BY processed.subscriber_id LIMIT 1
  )
  FROM known WHERE known.subscriber_id IS NOT NULL
)
SELECT subscriber_id FROM known WHERE subscriber_id IS NOT NULL LIMIT 5"""
        """Some of the subscribers, by a step in the primary key for each: → names."""

        # -- the staging table ------------------------------------------------------------------------------------

        self.schema_of_tables = "SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = %s::regclass"
        """The schema of a table, quoted: (quoted name) → schema."""

        self.abandoned_staging = f"""
SELECT staging.relname FROM pg_class AS staging
WHERE staging.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = %s::regclass)
  AND staging.relkind IN ('p', 'r') AND NOT staging.relispartition AND staging.relname ~ %s
  AND NOT EXISTS (
    SELECT FROM {run} AS run
    WHERE run.run_id = substring(staging.relname FROM %s)
      AND run.finished_at IS NULL AND run.heartbeat_at > now() - make_interval(secs => %s)
  )"""
        """Staging tables that nobody has worked on for a while: (quoted name of the ledger, pattern of their names,
        the pattern with the run as its group, seconds) → names."""

        self.staging_of_run = """
SELECT staging.relname FROM pg_class AS staging
WHERE staging.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = %s::regclass)
  AND staging.relkind IN ('p', 'r') AND NOT staging.relispartition AND staging.relname ~ %s"""
        """Staging tables of one run: (quoted name of the ledger, pattern of their names) → names. Spark makes one
        without partitions where ours was dropped before the first row came."""

        self.partitions = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass"
        """The partitions of a table: (quoted name) → quoted names."""

        self.staged_as = """
SELECT obj_description(oid, 'pg_class'), relkind = 'p' FROM pg_class WHERE oid = to_regclass(%s)"""
        """A staging table's comment, and whether it has partitions: (quoted name) → a row, if there is such a table."""

        # Quoted and with their schema: for messages, and to look them up in the catalogue.
        self.bulk_load = run.replace("%%", "%")
        self.bulk_load_chunk = chunk.replace("%%", "%")
        self.processed_message = processed.replace("%%", "%")

    bound_wait = "SELECT set_config('lock_timeout', %s, true)"
    """Wait for locks no longer than this, in this transaction: (interval)."""

    set_back = "SELECT set_config('role', %s, true), set_config('search_path', %s, true)"
    """Take back what the caller's statements have set, for our own that follow: (role, search path)."""

    create_recorded = (
        'CREATE TEMPORARY TABLE pg_temp.txbox_recorded (message_id text COLLATE "C" NOT NULL) ON COMMIT DROP'
    )
    """Create the table of what was recorded after a race."""

    drop_unrecorded = f"""
DELETE FROM {FRESH} AS fresh
WHERE NOT EXISTS (SELECT FROM pg_temp.txbox_recorded AS recorded WHERE recorded.message_id = fresh.message_id)"""
    """Leave no event in ``fresh_event`` that someone else has recorded."""

    analyze_fresh = f"ANALYZE {FRESH}"
    """Tell the planner about the fresh events, for the caller's statements."""

    @staticmethod
    def create_fresh(columns: Sequence[EventColumn]) -> str:
        """Create ``fresh_event``, with the source's names. A column that is the id is made of it, and is not sent."""
        made = f'text COLLATE "C" GENERATED ALWAYS AS ({MESSAGE_ID}) STORED'
        defined = [f"{quote(one.name)} {made if one.staged_as == MESSAGE_ID else one.postgres_type}" for one in columns]
        return f"CREATE TEMPORARY TABLE {FRESH} ({', '.join([_ID, *defined])}) ON COMMIT DROP"

    @staticmethod
    def copy_fresh(columns: Sequence[EventColumn]) -> str:
        """Copy a chunk's distinct events, as CSV in which text is in quotes, for psycopg's own cursor.

        Arrow's texts are UTF-8, whatever encoding the session has.
        """
        names = ", ".join([MESSAGE_ID, *(quote(one.name) for one in _sent(columns))])
        return f"COPY {FRESH} ({names}) FROM STDIN (FORMAT csv, ENCODING 'UTF8')".replace("%%", "%")

    def find_fresh(self, columns: Sequence[EventColumn], staged: str) -> str:
        """Fill ``fresh_event`` with the staged events whose ids are not in the inbox, one of each id, sorted.

        The same values again.
        """
        sent = _sent(columns)
        names = ", ".join([MESSAGE_ID, *(quote(one.name) for one in sent)])
        values = ", ".join([MESSAGE_ID, *(one.staged_as for one in sent)])
        return f"""
INSERT INTO {FRESH} ({names})
SELECT DISTINCT ON (message_id) {values} FROM {staged} AS event
WHERE NOT EXISTS (SELECT FROM {self._processed_in_range})
ORDER BY message_id"""

    def count_parked(self, events: str) -> str:
        """Count the events that wait as dead letters: (subscriber). There are few letters, and no index on the events.

        Args:
            events: the relation that holds them, quoted.
        """
        return f"""
SELECT count(DISTINCT event.message_id) FROM {events} AS event
JOIN {self._letter} AS letter ON letter.message_id = event.message_id
JOIN {self._processed} AS processed
  ON processed.subscriber_id = letter.subscriber_id AND processed.message_id = letter.message_id
WHERE letter.subscriber_id = %s AND letter.redriven_at IS NULL AND processed.dead_letter_id IS NOT NULL"""

    @staticmethod
    def distinct_ids(staged: str) -> str:
        """Count a chunk's rows and ids."""
        return f"SELECT count(*), count(DISTINCT message_id) FROM {staged}"

    @staticmethod
    def any_row(table: str) -> str:
        """Look for a row, any row."""
        return f"SELECT FROM {table} LIMIT 1"

    @staticmethod
    def analyze(table: str) -> str:
        """Tell the planner about the ids of a chunk."""
        return f"ANALYZE {table} (message_id)"

    @staticmethod
    def create_staging(
        schema: str, name: str, columns: Sequence[EventColumn], bounds: Sequence[str], comment: str
    ) -> tuple[str, ...]:
        """Create a staging table with one partition for each chunk.

        Unlogged: what is in it is in the source too. Postgres empties such a table when it recovers from a crash.

        Args:
            schema: of our tables, quoted.
            name: of the staging table.
            columns: of the events.
            bounds: between the chunks.
            comment: by which to know what is in it.

        Returns:
            The statements; none takes parameters, and bounds stand in them as quoted literals, because DDL has no
            other place for them.
        """
        ends = ["MINVALUE", *(_literal(bound) for bound in bounds), "MAXVALUE"]
        table = f"{schema}.{quote(name)}"
        return (
            f"CREATE TABLE {table} ({_staged_columns(columns)}) PARTITION BY RANGE (message_id)",
            f"COMMENT ON TABLE {table} IS {_literal(comment)}",
            *(
                f"CREATE UNLOGGED TABLE {schema}.{quote(f'{name}_{chunk}')} PARTITION OF {table} "
                f"FOR VALUES FROM ({first}) TO ({beyond}) WITH (autovacuum_enabled = false)"
                for chunk, (first, beyond) in enumerate(pairwise(ends))
            ),
        )

    @staticmethod
    def drop_tables(names: Sequence[str]) -> str:
        """Drop tables, whose names are quoted."""
        return f"DROP TABLE IF EXISTS {', '.join(names)}"


@lru_cache(maxsize=64)
def load_statements(schema: str | None = None, prefix: str = "") -> LoadStatements:
    """Return the statements for one place; the same object for the same arguments."""
    return LoadStatements(schema, prefix)


def quote(name: str) -> str:
    """Return a name, quoted as Postgres and psycopg's placeholders need it."""
    return str(_PREPARER.quote_identifier(name))


def in_one_statement(script: str) -> str:
    """Wrap a script of SQL so that Postgres itself refuses to end the transaction in it.

    Sent as it is, a script with COMMIT in it would commit the records of its events in the middle of their effects.
    EXECUTE runs every statement but those, whatever comments or quotes they hide behind.
    https://www.postgresql.org/docs/current/plpgsql-statements.html#PLPGSQL-STATEMENTS-EXECUTING-DYN

    Args:
        script: statements, separated by semicolons.
    """
    tag = "txbox"
    while f"${tag}" in script:
        tag += "x"
    return f"DO ${tag}_do$ BEGIN EXECUTE ${tag}${script}${tag}$; END ${tag}_do$"


def _sent(columns: Sequence[EventColumn]) -> list[EventColumn]:
    """The columns that are sent beside the id."""
    return [one for one in columns if one.staged_as != MESSAGE_ID]


def _staged_columns(columns: Sequence[EventColumn]) -> str:
    return ", ".join([_ID, *(f"{one.staged_as} {one.postgres_type}" for one in _sent(columns))])


def _quoted(table: Table) -> str:
    return str(_PREPARER.format_table(table))


def _literal(text: str) -> str:
    return psycopg_sql.Literal(text).as_string(None).replace("%", "%%")


_ID = f'{MESSAGE_ID} text COLLATE "C" NOT NULL'
_PREPARER = psycopg_dialect().identifier_preparer  # type: ignore[no-untyped-call]
