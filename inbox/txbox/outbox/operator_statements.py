"""Every SQL statement behind the operator's questions about the outbox: how it stands, and what was sent.

None of them may take a busy database down: what could read millions of rows has a limit in it, and is run with a
time-out (``txbox.outbox.status``).
"""

from functools import lru_cache

from txbox.postgres.sql import microseconds, quoted
from txbox.schema import tables

__all__ = ["OperatorStatements", "operator_statements"]


class OperatorStatements:
    """The statements for the outbox in one schema, under one prefix."""

    def __init__(self, schema: str | None, prefix: str) -> None:
        described = self.tables = tables(schema, prefix)
        outbox = quoted(described.outbox_message)
        sent = quoted(described.outbox_sent)
        relay = quoted(described.outbox_relay)

        # -- how the outbox stands --------------------------------------------------------------------------------

        self.bounded = "SELECT set_config('statement_timeout', %s, true)"
        """Bound the time of every later statement of this transaction: (milliseconds, as text)."""

        self.by_index = "SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true)"
        """Have later statements of this transaction jump along an index, whatever the statistics of a queue say."""

        looked_at = "m.destination, m.due_at, m.held, m.attempts, left(m.error, 500) AS error, m.published_at"

        # Refused, or behind one that was; not yet due; or else to be sent now. A relay that is at work takes a delayed
        # message's time away when it has come, so the age of one is known only while no relay has seen it.
        stands = """, kinds AS (
  SELECT destination, attempts, held OR attempts > 0 AS failed,
    NOT held AND attempts = 0 AND coalesce(due_at > now(), false) AS delayed,
    CASE WHEN held OR attempts > 0 THEN published_at ELSE greatest(published_at, due_at) END AS since
  FROM looked_at
), worst AS (
  SELECT DISTINCT ON (destination) destination, error
  FROM looked_at WHERE attempts > 0 ORDER BY destination, attempts DESC
)
SELECT destination, count(*) FILTER (WHERE NOT failed AND NOT delayed) AS waiting,
  count(*) FILTER (WHERE delayed) AS delayed, count(*) FILTER (WHERE failed) AS retrying,
  extract(epoch FROM now() - min(least(since, now())) FILTER (WHERE NOT delayed AND isfinite(since)))::float8
    AS oldest_seconds,
  max(attempts) AS most_attempts, (SELECT error FROM worst WHERE worst.destination = kinds.destination) AS error
FROM kinds GROUP BY destination ORDER BY destination"""

        self.backlog = f"""
WITH looked_at AS MATERIALIZED (SELECT {looked_at} FROM {outbox} AS m LIMIT %s){stands}"""
        """The messages of each destination: (how many to look at, in all) → rows."""

        self.backlog_by_lane = f"""
WITH RECURSIVE walk AS (
  (SELECT lane FROM {outbox} ORDER BY lane, position LIMIT 1)
  UNION ALL
  SELECT next.lane FROM walk CROSS JOIN LATERAL (
    SELECT m.lane FROM {outbox} AS m WHERE m.lane > walk.lane ORDER BY m.lane, m.position LIMIT 1
  ) AS next
), lanes AS MATERIALIZED (
  SELECT lane FROM walk LIMIT %s
), share AS MATERIALIZED (
  SELECT greatest(%s / greatest(count(*), 1), 1) AS rows FROM lanes
), looked_at AS MATERIALIZED (
  SELECT m.* FROM share CROSS JOIN lanes CROSS JOIN LATERAL (
    SELECT {looked_at} FROM {outbox} AS m WHERE m.lane = lanes.lane ORDER BY m.position LIMIT share.rows
  ) AS m
){stands}"""
        """The first messages of each destination, where there are too many to look at all of them: (how many lanes, how
        many messages, in all) → rows as ``backlog``. Each lane's first ones are looked at, so every destination is
        seen, and its oldest message."""

        self.row_estimates = """
SELECT CASE WHEN pg_stat_get_live_tuples(oid) > 0 THEN pg_stat_get_live_tuples(oid)
  ELSE greatest(reltuples, 0)::bigint END AS live, pg_stat_get_dead_tuples(oid) AS dead
FROM pg_class WHERE oid = %s::regclass"""
        """How many rows a table has, and how many that were removed and not cleaned up, by Postgres's statistics:
        (quoted table name) → rows, removed rows."""

        # A session ends with its process at once, wherever that was killed; a standby knows nothing of it.
        stale = """(
    seen_at < now() - %s::interval
    OR NOT pg_is_in_recovery() AND known.backend_pid IS NOT NULL
      AND NOT EXISTS (SELECT FROM pg_stat_activity AS session WHERE session.pid = known.backend_pid)
  )"""

        self.relays = f"""
SELECT relay_id, host, pid, sent, failed, CASE WHEN seen_at > started_at THEN sent_per_second END AS sent_per_second,
  {microseconds("started_at")} AS started_at,
  greatest(extract(epoch FROM now() - seen_at), 0)::float8 AS seen_seconds_ago, outages, {stale} AS stale
FROM {relay} AS known ORDER BY host, pid, relay_id"""
        """The relays that have not signed off; a stale one has no session, or has not reported for so long: (span).
        After one report, there is no rate."""

        self.relays_at_work = f"SELECT count(*) FROM {relay} AS known WHERE NOT {stale}"
        """How many relays are not stale: (span) → number."""

        self.kept = f"""
SELECT (SELECT count(*) FROM (SELECT FROM {sent} LIMIT %s) AS bounded) AS messages,
  (SELECT {microseconds("min(sent_at)")} FROM {sent}) AS since"""
        """How many sent messages are kept, and since when: (limit) → messages, at most so many, time."""

        # What Postgres cleans up in a table is decided by the oldest transaction number that somebody of the same
        # database still needs: as his own number, as that of his snapshot, or through a slot, whatever its database.
        # VACUUM itself is left out of it. https://www.postgresql.org/docs/current/routine-vacuuming.html
        self.snapshot_holders = """
WITH holders AS (
  SELECT CASE backend_type WHEN 'walsender' THEN 'standby' ELSE 'session' END AS kind, pid, usename AS owner,
    application_name AS name, state, extract(epoch FROM clock_timestamp() - xact_start)::float8 AS seconds,
    greatest(age(backend_xid), age(backend_xmin)) AS transactions, query
  FROM pg_stat_activity AS activity
  WHERE (datid IS NULL OR datname = current_database()) AND pid <> pg_backend_pid()
    AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL)
    AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum AS vacuum WHERE vacuum.pid = activity.pid)
  UNION ALL
  SELECT 'prepared transaction', NULL, owner, gid, NULL,
    extract(epoch FROM clock_timestamp() - prepared)::float8, age(transaction), NULL
  FROM pg_prepared_xacts WHERE database = current_database()
  UNION ALL
  SELECT 'replication slot', active_pid, NULL, slot_name, CASE WHEN active THEN 'active' ELSE 'inactive' END, NULL,
    age(xmin), NULL
  FROM pg_replication_slots WHERE xmin IS NOT NULL
)
SELECT kind, pid, owner, name, state, seconds, transactions, query FROM holders
WHERE (seconds >= %s AND transactions >= %s) OR transactions >= %s
ORDER BY transactions DESC, seconds DESC NULLS LAST LIMIT %s"""
        """Who keeps Postgres from cleaning up: (seconds, with so many transactions; or more transactions, whatever the
        time; how many) → rows, the oldest first. What others run is hidden from an ordinary user: null, and a note in
        place of the query."""

        self.sees_all_sessions = "SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')"
        """Whether this user may see what others run."""

        # -- what was sent ----------------------------------------------------------------------------------------

        # Positions end a range of messages; times let the index on sent_at find it.
        wanted = """
(%s::text IS NULL OR destination = %s) AND (%s::text IS NULL OR key = %s) AND (%s::text IS NULL OR message_id = %s)
  AND sent_at >= coalesce(now() - %s::interval, %s::timestamptz, '-infinity')
  AND sent_at < coalesce(now() - %s::interval, %s::timestamptz, 'infinity')"""

        columns = (
            f"message_id, position, destination, key, headers, {microseconds('published_at')} AS published_at, "
            f"{microseconds('sent_at')} AS sent_at"
        )

        self.sent = f"""
SELECT {columns}, octet_length(body) AS size, CASE WHEN %s THEN body END AS body
FROM {sent} AS kept WHERE {wanted} AND position > %s
  AND (sent_at, position) < (coalesce(%s::timestamptz, 'infinity'), coalesce(%s::bigint, 0))
ORDER BY kept.sent_at DESC, position DESC LIMIT %s"""
        """What was sent, the last first: (with bodies, filter, position behind which it is, time and position of the
        last one of the page before, limit) → rows. Both, for all of one transaction have one time."""

        self.is_any_kept = f"SELECT EXISTS (SELECT FROM {sent})"
        """Whether anything that was sent is kept."""

        self.planned_by_values = "SELECT set_config('plan_cache_mode', 'force_custom_plan', true)"
        """Have later statements of this transaction planned for what they are given: filters that are null cost
        nothing, and those that are not use their index."""

        self.replay_plan = f"""
SELECT count(*) AS messages, sum(copies)::bigint AS copies, min(position) AS first, max(position) AS last,
  {microseconds("min(sent_at)")} AS sent_from, {microseconds("max(sent_at)")} AS sent_to,
  {microseconds("min(since)")} AS since, {microseconds("max(until)")} AS until
FROM (
  SELECT found.*, (row_number() OVER (ORDER BY position) - 1) / %s AS chunk
  FROM (
    SELECT position, sent_at, min(position) OVER same AS first, count(*) OVER same - 1 AS copies,
      min(sent_at) OVER () AS since, max(sent_at) OVER () AS until
    FROM {sent} WHERE {wanted} WINDOW same AS (PARTITION BY message_id, destination)
  ) AS found
  WHERE position = first AND position > %s
) AS numbered
GROUP BY chunk ORDER BY chunk"""
        """The chunks of a replay: (messages of each, filter, position behind which they are) → rows in order: how many,
        how many copies of them are left out, positions and times between which they lie, times between which all of the
        filter's lie. Of what was sent to one destination under one id, the first is taken, before the position is
        looked at: a replay that goes on leaves out what it has had sent before. Positions and times go nearly together,
        so each chunk is read by its times; no index on positions is needed, which every send would pay for."""

        self.replay_chunk = f"""
SELECT message_id, destination, key, headers, body, position FROM {sent} AS kept
WHERE sent_at BETWEEN %s AND %s AND position BETWEEN %s AND %s AND {wanted} AND NOT EXISTS (
  SELECT FROM {sent} AS earlier
  WHERE earlier.message_id = kept.message_id AND earlier.position < kept.position
    AND earlier.destination = kept.destination AND (%s::text IS NULL OR earlier.key = %s)
    AND earlier.sent_at BETWEEN %s AND %s
)
ORDER BY position"""
        """One chunk of a replay: (its times, its positions, filter, key twice, times of the whole plan) → rows in order
        of their positions, without the copies among them."""

        # Quoted and with their schema: for messages, and to look them up in the catalogue.
        self.outbox_message = outbox.replace("%%", "%")
        self.outbox_sent = sent.replace("%%", "%")
        self.outbox_relay = relay.replace("%%", "%")


@lru_cache(maxsize=64)
def operator_statements(schema: str | None = None, prefix: str = "") -> OperatorStatements:
    """Return the statements for one place; the same object for the same arguments."""
    return OperatorStatements(schema, prefix)
