"""The SQL statements of the ledger in Postgres: named, pure; each is one atomic step, and a transaction by itself.

The clock is the database's. ``clock_timestamp()`` and not ``now()``: a statement that has waited for a row begins to
count when it has the row, not when it was sent.
"""

from functools import lru_cache

from txbox.schema import tables
from txbox.statements import quoted

__all__ = ["LeaseStatements", "lease_statements"]


class LeaseStatements:
    """The statements for the table in one schema, under one prefix."""

    def __init__(self, schema: str | None, prefix: str) -> None:
        table = quoted(tables(schema, prefix).message_lease)
        key = "lease.subscriber_id = %(subscriber)s AND lease.message_id = %(message)s"
        from_now = "clock_timestamp() + make_interval(secs => %(seconds)s::double precision)"

        # The conditions are looked at when the row is locked, in its newest version. So of two who find an expired
        # lease, the second one finds the first one's:
        #
        #   A  INSERT … ON CONFLICT: locks the row, it has expired: takes it ── commits
        #   B        INSERT … ON CONFLICT: waits for the row ─────────────────────────┘ in flight: nothing is updated
        #
        # fence = DEFAULT, and not excluded.fence: that number was drawn before the wait, and could be smaller than the
        # one that somebody has drawn and used meanwhile.

        self.acquire = f"""
WITH acquired AS (
  INSERT INTO {table} AS lease
    (subscriber_id, message_id, attempts, owner, fingerprint, acquired_at, expires_at)
  VALUES (%(subscriber)s, %(message)s, 1, %(owner)s, %(fingerprint)s, clock_timestamp(), {from_now})
  ON CONFLICT (subscriber_id, message_id) DO UPDATE SET
    fence = DEFAULT,
    attempts = lease.attempts + 1,
    owner = excluded.owner,
    fingerprint = coalesce(lease.fingerprint, excluded.fingerprint),
    acquired_at = clock_timestamp(),
    expires_at = {from_now}
  WHERE lease.completed_at IS NULL
    AND (lease.expires_at IS NULL OR lease.expires_at <= clock_timestamp())
    AND (lease.fingerprint IS NULL OR excluded.fingerprint IS NULL OR lease.fingerprint = excluded.fingerprint)
  RETURNING fence, attempts, attempts - 1 - failures + unknown_before AS unknown
)
SELECT fence, attempts, unknown, NULL::bool, NULL::double precision, NULL::bytea, NULL::bytea FROM acquired
UNION ALL
SELECT NULL, NULL, NULL, lease.completed_at IS NOT NULL,
  extract(epoch FROM lease.expires_at - clock_timestamp())::double precision, lease.result, lease.fingerprint
FROM {table} AS lease WHERE {key} AND NOT EXISTS (SELECT FROM acquired)"""
        """Ask for a lease → fence, attempts and unknown attempts if it is ours; or else: completed, seconds left,
        result, fingerprint. That part is as old as the statement's snapshot: it may know nothing of a row that the
        first part has just waited for, or still think it free; then the answer is to ask again."""

        self.renew = f"""
UPDATE {table} AS lease SET expires_at = {from_now}
WHERE {key} AND lease.fence = %(fence)s AND lease.expires_at IS NOT NULL"""
        """Renew a lease, if it is the newest, whether or not it has run out."""

        self.complete = f"""
UPDATE {table} AS lease SET
  expires_at = NULL,
  completed_at = coalesce(lease.completed_at, clock_timestamp()),
  result = CASE WHEN lease.completed_at IS NULL THEN %(result)s ELSE lease.result END
WHERE {key} AND lease.fence = %(fence)s AND coalesce(lease.expires_at, lease.completed_at) IS NOT NULL"""
        """Complete a message, if the lease is the newest; the same lease may do so again, if the answer was lost."""

        self.release = f"""
UPDATE {table} AS lease SET
  expires_at = NULL,
  attempts = CASE WHEN %(forget)s THEN 0 WHEN lease.expires_at IS NULL THEN lease.attempts
    ELSE lease.attempts + %(attempts)s END,
  failures = CASE WHEN %(forget)s THEN 0 WHEN lease.expires_at IS NULL THEN lease.failures
    ELSE lease.failures + %(failures)s END,
  unknown_before = CASE WHEN %(forget)s THEN %(unknown_now)s ELSE lease.unknown_before END
WHERE {key} AND lease.fence = %(fence)s AND lease.completed_at IS NULL"""
        """Free a message whose attempt has not completed it, if the lease is the newest; done again by the same lease,
        it changes nothing. Attempts and failures change by what is given: 0 and 1 for one that has failed."""

        self.estimate = "SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = %s::regclass"
        """How many rows there are, by the planner's figures: (quoted table name) → rows."""

        self.counts = f"""
SELECT subscriber_id,
  count(*) FILTER (WHERE completed_at IS NOT NULL),
  count(*) FILTER (WHERE expires_at > clock_timestamp()),
  count(*) FILTER (WHERE expires_at <= clock_timestamp()),
  count(*) FILTER (WHERE completed_at IS NULL AND expires_at IS NULL),
  extract(epoch FROM clock_timestamp() - min(acquired_at) FILTER (WHERE expires_at IS NOT NULL))::double precision
FROM {table} GROUP BY subscriber_id ORDER BY subscriber_id"""
        """Per subscriber: completed, in flight, run out, failed, and the age of the oldest attempt under way."""

        # Quoted and with its schema, for messages.
        self.message_lease = table.replace("%%", "%")


@lru_cache(maxsize=64)
def lease_statements(schema: str | None = None, prefix: str = "") -> LeaseStatements:
    """Return the statements for one place; the same object for the same arguments."""
    return LeaseStatements(schema, prefix)
