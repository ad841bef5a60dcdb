"""The SQL statements of the ledger in Postgres: named, pure; each is one atomic step, and a transaction by itself.

The clock is the database's. ``clock_timestamp()`` and not ``now()``: a statement that has waited for a row begins to
count when it has the row, not when it was sent.

**Every commit of a ledger is durable**, whatever ``synchronous_commit`` the role, the database or the connection have:
each statement sets it for its own transaction, in its WHERE, without another round trip. A stronger value is kept.

**A fence** is the server's timeline, and below it the database's clock in milliseconds; and always more than the row's
own. Postgres counts the timeline up whenever a standby is promoted or a backup recovered. So a promoted server gives
out no fence that the old one gave out, though it may never have heard of it; a sequence repeats what was lost. The
clock is for rows that were deleted, and for servers that do not tell their timeline.
"""

from functools import lru_cache

from txbox.postgres.sql import quoted
from txbox.schema import tables

__all__ = ["LeaseStatements", "lease_statements"]


_CLOCK_BITS = 44
"""Of a fence, for the clock: milliseconds since 1970 until the year 2527. Above them is room for 2**19 timelines."""

_TIMELINE = "('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint"
"""The server's timeline: the first eight hexadecimal digits of a WAL file's name."""

_DURABLE = (
    "set_config('synchronous_commit', CASE current_setting('synchronous_commit')"
    " WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true) IS NOT NULL"
)
"""True, and this transaction's commit is durable: also on a synchronous standby, if there is one."""


class LeaseStatements:
    """The statements for the table in one schema, under one prefix."""

    def __init__(self, schema: str | None, prefix: str, *, timeline: bool = True) -> None:
        self.timeline = timeline
        self.tables = tables(schema, prefix)
        table = quoted(self.tables.message_lease)
        key = "lease.subscriber_id = %(subscriber)s AND lease.message_id = %(message)s"
        from_now = "clock_timestamp() + make_interval(secs => %(seconds)s::double precision)"
        # Not in seconds: how many digits a float has hangs on the session's extra_float_digits.
        server_time = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
        # The clock as it goes on if it was set forward lately: %(latest)s is null where nothing is known of it.
        now_at_most = "least(clock_timestamp(), to_timestamp(%(latest)s::double precision))"

        # The conditions are looked at when the row is locked, in its newest version. So of two who find an expired
        # lease, the second one finds the first one's:
        #
        #   A  INSERT … ON CONFLICT: locks the row, it has expired: takes it ── commits
        #   B        INSERT … ON CONFLICT: waits for the row ─────────────────────────┘ in flight: nothing is updated
        #
        # The fence is made before that wait, and may be smaller than one that was made and used meanwhile: hence the
        # row's own fence, too.
        milliseconds = "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
        fence = f"({_TIMELINE} << {_CLOCK_BITS}) + {milliseconds}" if timeline else milliseconds

        self.acquire = f"""
WITH acquired AS (
  INSERT INTO {table} AS lease
    (subscriber_id, message_id, fence, attempts, owner, fingerprint, acquired_at, expires_at, lease_seconds)
  SELECT %(subscriber)s, %(message)s, {fence}, 1, %(owner)s, %(fingerprint)s::bytea, clock_timestamp(), {from_now},
    %(seconds)s
  WHERE {_DURABLE}
  ON CONFLICT (subscriber_id, message_id) DO UPDATE SET
    fence = greatest(excluded.fence, lease.fence + 1),
    attempts = lease.attempts + 1,
    owner = excluded.owner,
    fingerprint = coalesce(lease.fingerprint, excluded.fingerprint),
    acquired_at = clock_timestamp(),
    expires_at = {from_now},
    lease_seconds = excluded.lease_seconds
  WHERE lease.completed_at IS NULL
    AND (lease.expires_at IS NULL OR lease.expires_at <= {now_at_most})
    AND (lease.fingerprint IS NULL OR excluded.fingerprint IS NULL OR lease.fingerprint = excluded.fingerprint)
  RETURNING fence, attempts, attempts - 1 - failures + unknown_before AS unknown
)
SELECT fence, attempts, unknown, {server_time},
  NULL::bool, NULL::double precision, NULL::double precision, NULL::bytea, NULL::bytea FROM acquired
UNION ALL
SELECT lease.fence, NULL, NULL, {server_time}, lease.completed_at IS NOT NULL,
  extract(epoch FROM lease.expires_at - {now_at_most})::double precision, lease.lease_seconds,
  lease.result, lease.fingerprint
FROM {table} AS lease WHERE {key} AND NOT EXISTS (SELECT FROM acquired)"""
        """Ask for a lease → fence, attempts, unknown attempts and the server's time if it is ours; or else: fence, two
        nulls, the server's time, completed, seconds left, the lease's length, result, fingerprint. The server's time is
        in microseconds. The second part is as old as the statement's snapshot: it may know nothing of a row that
        the first part has just waited for, or still think it free; then the answer is to ask again."""

        self.read_timeline = f"SELECT {_TIMELINE}"
        """Read the server's timeline → number; for where an acquisition was refused."""

        self.renew = f"""
UPDATE {table} AS lease SET expires_at = {from_now}, lease_seconds = %(seconds)s
WHERE {key} AND lease.fence = %(fence)s AND lease.expires_at IS NOT NULL AND {_DURABLE}
RETURNING {server_time}"""
        """Renew a lease, if it is the newest, whether or not it has run out → the server's time, in microseconds."""

        in_full = "clock_timestamp() + make_interval(secs => lease.lease_seconds)"
        self.shorten = f"""
UPDATE {table} AS lease SET expires_at = {in_full}
WHERE {key} AND lease.fence = %(fence)s AND lease.expires_at > {in_full} AND {_DURABLE}"""
        """Have another's lease end in its length from now, if it lasts longer: it was given before the clock was set
        back. Its owner counts from before now, so this takes nothing from it."""

        self.complete = f"""
UPDATE {table} AS lease SET
  expires_at = NULL,
  completed_at = coalesce(lease.completed_at, clock_timestamp()),
  result = CASE WHEN lease.completed_at IS NULL THEN %(result)s ELSE lease.result END
WHERE {key} AND lease.fence = %(fence)s AND coalesce(lease.expires_at, lease.completed_at) IS NOT NULL
  AND {_DURABLE}"""
        """Complete a message, if the lease is the newest; the same lease may do so again, if the answer was lost."""

        self.release = f"""
UPDATE {table} AS lease SET
  expires_at = NULL,
  attempts = CASE WHEN %(forget)s THEN 0 WHEN lease.expires_at IS NULL THEN lease.attempts
    ELSE lease.attempts + %(attempts)s END,
  failures = CASE WHEN %(forget)s THEN 0 WHEN lease.expires_at IS NULL THEN lease.failures
    ELSE lease.failures + %(failures)s END,
  unknown_before = CASE WHEN %(forget)s THEN %(unknown_now)s WHEN lease.expires_at IS NULL THEN lease.unknown_before
    ELSE lease.unknown_before + %(uncounted)s END
WHERE {key} AND lease.fence = %(fence)s AND lease.completed_at IS NULL AND {_DURABLE}"""
        """Free a message whose attempt has not completed it, if the lease is the newest; done again by the same lease,
        it changes nothing. Attempts, failures and unknown attempts out of the count change by what is given: 0, 1 and 0
        for one that has failed."""

        self.estimate = "SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = %s::regclass"
        """How many rows there are, by the planner's figures: (quoted table name) → rows."""

        self.counts = f"""
SELECT subscriber_id,
  count(*) FILTER (WHERE completed_at IS NOT NULL),
  count(*) FILTER (WHERE expires_at > clock_timestamp()),
  count(*) FILTER (WHERE expires_at <= clock_timestamp()),
  count(*) FILTER (WHERE completed_at IS NULL AND expires_at IS NULL),
  extract(
    epoch FROM clock_timestamp() - min(least(acquired_at, clock_timestamp())) FILTER (WHERE expires_at IS NOT NULL)
  )::double precision
FROM {table} GROUP BY subscriber_id ORDER BY subscriber_id"""
        """Per subscriber: completed, in flight, run out, failed, and the age of the oldest attempt under way."""

        # Quoted and with its schema, for messages.
        self.message_lease = table.replace("%%", "%")


@lru_cache(maxsize=64)
def lease_statements(schema: str | None = None, prefix: str = "", *, timeline: bool = True) -> LeaseStatements:
    """Return the statements for one place; the same object for the same arguments.

    Args:
        schema, prefix: the place.
        timeline: whether the server tells its timeline.
    """
    return LeaseStatements(schema, prefix, timeline=timeline)
