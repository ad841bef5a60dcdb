"""Every SQL statement of the outbox and its relay: named, pure, in one place."""

from functools import lru_cache

from txbox.postgres.sql import literal, microseconds, quoted
from txbox.schema import tables

__all__ = ["OutboxStatements", "outbox_statements"]


class OutboxStatements:
    """The statements for the outbox in one schema, under one prefix."""

    def __init__(self, schema: str | None, prefix: str) -> None:
        described = self.tables = tables(schema, prefix)
        outbox = quoted(described.outbox_message)
        sent = quoted(described.outbox_sent)
        relay = quoted(described.outbox_relay)

        # -- publishing -------------------------------------------------------------------------------------------

        columns = "lane, message_id, destination, key, headers, body, due_at"

        self.publish_one = f"""
INSERT INTO {outbox} ({columns})
VALUES (%s, %s, %s, %s, %s::jsonb, %s, coalesce(clock_timestamp() + %s::interval, %s::timestamptz))
RETURNING pg_backend_pid()"""
        """Publish one message: (lane, id, destination, key, headers as JSON, body, delay as a span, as a moment) → the
        server's process id."""

        self.publish_many = f"""
WITH published AS (
  INSERT INTO {outbox} ({columns})
  SELECT new.lane, new.message_id, new.destination, new.key, new.headers::jsonb, new.body,
    coalesce(clock_timestamp() + new.seconds, new.moment)
  FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::text[], %s::bytea[], %s::interval[],
    %s::timestamptz[]) WITH ORDINALITY
    AS new (lane, message_id, destination, key, headers, body, seconds, moment, number)
  ORDER BY new.number
)
SELECT pg_backend_pid()"""
        """Publish many messages: the same as arrays → the server's process id. Sorted rows are given their positions in
        that order."""

        # Advisory locks have one space of numbers in a database: those of another outbox are to be other ones.
        lock = f"('{literal(outbox)}'::regclass::oid::bigint << 31)"

        # -- connections ------------------------------------------------------------------------------------------

        self.default_isolation = "SHOW default_transaction_isolation"
        """What a transaction is that does not say."""

        self.missing_rights = """
SELECT named.name, string_agg(right_to, ', ')
FROM unnest(%s::text[]) AS named (name)
CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS right_to
WHERE NOT has_table_privilege(named.name::regclass, right_to)
GROUP BY named.name ORDER BY named.name"""
        """What the user may not do with tables: (names) → name, rights that are lacking."""

        self.no_time_out = """
SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'idle_session_timeout'"""
        """Have the server keep a connection that says nothing for long: since PostgreSQL 14, a setting may end it."""

        self.backend_pid = "SELECT pg_backend_pid()"
        """Which server process answers."""

        self.still_there = "SELECT"
        """Fails if the transaction has been ended from outside."""

        # A crash of the server undoes commits that did not wait for the disk, and a relay that goes by what it has seen
        # before would go wrong. Its postmaster may survive the crash; its statistics do not.
        server = """extract(epoch FROM pg_postmaster_start_time())::text || ' '
    || coalesce(extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time())::text, '')"""

        # -- looking ----------------------------------------------------------------------------------------------
        #
        # What is new since the last look is told by transactions, not by positions. A position is drawn when a row is
        # inserted and is seen when its transaction commits, and these are two different orders:
        #
        #   A   inserts 1 ───────────────────────────── commits
        #   B       inserts 2 ── commits
        #   relay                         sees 2             sees 1
        #
        # A relay that remembered "seen up to 2" would never send 1. This one remembers the snapshot of its last look:
        # new is what was inserted by a transaction that had not begun then (its number is not below the snapshot's
        # xmax), or that was in progress (its number is listed in it). Nothing else can have become visible since.
        #
        # The scan begins where nobody has been, so what was deleted before does not slow it down, even while an old
        # snapshot keeps all of that from being removed.

        # Infinity, which nobody publishes but can be written, cannot be subtracted from a moment before PostgreSQL 17.
        found = f"""SELECT pg_current_snapshot()::text AS snapshot,
  {server} AS server,
  (SELECT array_agg(lane ORDER BY lane) FROM lanes) AS lanes,
  (SELECT array_agg(position ORDER BY lane) FROM lanes) AS positions,
  (SELECT extract(epoch FROM min(due_at))::float8 - extract(epoch FROM now())::float8 FROM {outbox}
   WHERE %s AND due_at IS NOT NULL AND NOT held) AS due_in,
  ARRAY(
    SELECT DISTINCT lane FROM {outbox} WHERE %s AND held AND due_at <= now() AND due_at < 'infinity'
  ) AS held_due"""

        # Above it are no numbers of this server's yet. Rows that were restored from another one may have such: they are
        # for the look at everything.
        ended = "(SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint)"

        # What a transaction has written that is still going on is not to be read again and again.
        ended_since = """ARRAY(
    SELECT number FROM unnest(%s::bigint[]) AS number
    WHERE pg_visible_in_snapshot(number::text::xid8, pg_current_snapshot())
  )"""

        self.look = f"""
WITH fresh AS MATERIALIZED (
  (SELECT lane, position FROM {outbox}
   WHERE due_at IS NULL AND transaction_id >= %s AND transaction_id < {ended} ORDER BY transaction_id LIMIT %s)
  UNION ALL
  (SELECT lane, position FROM {outbox}
   WHERE due_at IS NULL AND transaction_id = ANY({ended_since}) ORDER BY transaction_id LIMIT %s)
), lanes AS (
  SELECT lane, min(position) AS position FROM fresh GROUP BY lane
)
{found}, (SELECT count(*) FROM fresh) AS seen"""
        """Look for what is new: (the last snapshot's xmax, limit, its transactions in progress, limit, whether to look
        for what is due as well, the same) → this look's snapshot, which run of which server answers, the lanes of what
        is new, the first position in each, in how many seconds a message is due that waits for a time, lanes with held
        keys that are due, how many messages were seen."""

        self.begin_look = "BEGIN"
        self.plan_look = f"SELECT {_settings(*_PLAN_SETTINGS)}"
        self.end_look = "COMMIT"
        """Around a look at a burst: its plan must not depend on statistics."""

        self.look_at_burst = f"""
WITH lanes AS MATERIALIZED (
  SELECT lane, min(position) AS position FROM (
    SELECT lane, position FROM {outbox}
    WHERE due_at IS NULL AND transaction_id >= %s AND transaction_id < {ended}
    UNION ALL
    SELECT lane, position FROM {outbox} WHERE due_at IS NULL AND transaction_id = ANY({ended_since})
  ) AS fresh
  GROUP BY lane
)
{found}"""
        """A look at more than the limit of ``look``: (the last snapshot's xmax, its transactions in progress, as the
        last two of ``look``) → as ``look``."""

        self.look_at_all = f"""
WITH RECURSIVE lanes AS (
  (SELECT lane, position FROM {outbox} ORDER BY lane, position LIMIT 1)
  UNION ALL
  SELECT next.lane, next.position FROM lanes CROSS JOIN LATERAL (
    SELECT m.lane, m.position FROM {outbox} AS m WHERE m.lane > lanes.lane ORDER BY m.lane, m.position LIMIT 1
  ) AS next
)
{found}"""
        """The first look, at everything: (as the last two of ``look``) → as ``look``. It jumps from lane to lane by the
        primary key, so it takes the same time with a thousand messages as with sixteen million; a lane whose messages
        all wait is looked at in vain."""

        self.wake_due = f"""
WITH turn AS MATERIALIZED (
  SELECT pg_try_advisory_xact_lock({lock} # -1) AS ours
), due AS MATERIALIZED (
  SELECT ctid AS place FROM {outbox}
  WHERE due_at <= now() AND NOT held AND (SELECT ours FROM turn)
  ORDER BY due_at, position LIMIT %s FOR UPDATE SKIP LOCKED
), woken AS (
  DELETE FROM {outbox} WHERE ctid = ANY(ARRAY(SELECT place FROM due)) RETURNING *
)
INSERT INTO {outbox} ({columns}, published_at, attempts, error)
SELECT lane, message_id, destination, key, headers, body, NULL, published_at, attempts, error
FROM woken ORDER BY woken.due_at, woken.position"""
        """Put messages whose time has come behind the others, as if they were published now: (limit).

        They are inserted anew, sorted, so that they are given their positions in the order of their times; and one
        relay does it at a time, lest another one's come in between.
        """

        # -- sending ----------------------------------------------------------------------------------------------

        claim = f"""
SELECT {_settings("synchronous_commit", "idle_in_transaction_session_timeout", *_PLAN_SETTINGS)},
  {server} AS server, current_setting('transaction_read_only') = 'on' AS read_only, ARRAY(
  SELECT lane FROM unnest(%s::bigint[]) AS lane
  WHERE pg_try_advisory_xact_lock({lock} # lane)
) AS lanes"""
        self.claim = claim
        """Claim those of these lanes that nobody works on, to the end of the transaction, and whatever ends it:
        (milliseconds after which the server is to end a transaction that says nothing, lanes) → the lanes, last,
        and before them which run of which server answers, and whether the transaction can only read. It waits for
        nobody, writes nothing, and holds no snapshot while messages are sent."""

        self.claim_timed = claim.replace("SELECT", f"SELECT {_settings('transaction_timeout')},", 1)
        """The same for PostgreSQL 17 and later, which can limit the time of a transaction."""

        message = f"""m.lane, m.position, m.held, m.message_id, m.destination, m.body, m.key, m.headers::text,
    m.attempts, {microseconds("m.published_at")} AS published_at"""

        read = """CASE WHEN isfinite(m.published_at) THEN extract(epoch FROM clock_timestamp() - m.published_at) ELSE 0
    END::float8 AS age,
    sum(octet_length(m.body)) OVER (ORDER BY m.position) - octet_length(m.body) AS bytes_before"""

        self.fresh = f"""
SELECT *, EXISTS (SELECT FROM {outbox} WHERE held AND lane = ANY(%s::bigint[])) AS any_held FROM (
  SELECT {message}, {read} FROM unnest(%s::bigint[], %s::bigint[]) AS wanted (lane, position)
  CROSS JOIN LATERAL (
    SELECT * FROM {outbox} AS m
    WHERE m.lane = wanted.lane AND m.position >= wanted.position AND m.due_at IS NULL
    ORDER BY m.position LIMIT %s
  ) AS m
) AS found
WHERE bytes_before < %s ORDER BY position"""
        """Read new messages of claimed lanes in their order: (lanes, lanes, positions, how many of each, bytes of them
        all) → rows, each with the bytes of all before it, and whether any key of these lanes is held."""

        self.held_keys = f"""
SELECT lane, destination, key FROM unnest(%s::bigint[], %s::text[], %s::text[]) AS k (lane, destination, key)
WHERE EXISTS (
  SELECT FROM {outbox} AS m
  WHERE m.held AND m.lane = k.lane AND m.key = k.key AND m.destination = k.destination
)"""
        """Which of these keys are held: (lanes, destinations, keys)."""

        self.due_keys = f"""
SELECT lane, destination, key FROM {outbox}
WHERE held AND due_at <= now() AND due_at < 'infinity' AND lane = ANY(%s::bigint[])
ORDER BY due_at LIMIT %s"""
        """Held keys of claimed lanes whose time has come: (lanes, how many)."""

        self.due = f"""
SELECT * FROM (
  SELECT {message}, {read}
  FROM unnest(%s::bigint[], %s::text[], %s::text[]) AS wanted (lane, destination, key)
  CROSS JOIN LATERAL (
    SELECT * FROM {outbox} AS m
    WHERE m.held AND m.lane = wanted.lane AND m.key = wanted.key AND m.destination = wanted.destination
    ORDER BY m.position LIMIT %s
  ) AS m
) AS found
WHERE bytes_before < %s ORDER BY position"""
        """Read the messages of held keys that are due: (lanes, destinations, keys, how many of each, bytes)."""

        # -- settling ---------------------------------------------------------------------------------------------

        # An array that is written as text costs the client a fifth of what psycopg takes to write it value by value.
        places = "%s::text::bigint[], %s::text::bigint[]"

        gone = f"""
DELETE FROM {outbox} AS m USING unnest({places}) AS gone (lane, position)
WHERE m.lane = gone.lane AND m.position = gone.position"""

        self.durable = """
SELECT set_config('synchronous_commit', CASE reset_val WHEN 'off' THEN 'on' ELSE reset_val END, true)
FROM pg_settings WHERE name = 'synchronous_commit'"""
        """Have this transaction's commit wait for the disk again, whatever the user's default is."""

        self.forget = gone
        """Forget messages that were sent, or parked: (lanes, positions)."""

        self.keep = f"""
WITH sent AS (
  {gone}
  RETURNING m.message_id, m.position, m.destination, m.key, m.headers, m.body, m.published_at
)
INSERT INTO {sent} (message_id, position, destination, key, headers, body, published_at)
SELECT message_id, position, destination, key, headers, body, published_at FROM sent
ON CONFLICT DO NOTHING"""
        """Move messages that were sent to those that are kept: (lanes, positions)."""

        self.again = f"""
UPDATE {outbox} AS m
SET attempts = m.attempts + refused.counted::int, held = m.key IS NOT NULL, error = refused.error,
  due_at = clock_timestamp() + refused.pause
FROM unnest({places}, %s::text[], %s::interval[], %s::boolean[]) AS refused (lane, position, error, pause, counted)
WHERE m.lane = refused.lane AND m.position = refused.position"""
        """Have refused messages sent again after a pause, and hold their keys: (lanes, positions, errors, pauses,
        whether each is an attempt)."""

        self.hold = f"""
UPDATE {outbox} AS m SET held = true, due_at = 'infinity'
FROM unnest({places}) AS behind (lane, position)
WHERE m.lane = behind.lane AND m.position = behind.position"""
        """Have messages wait behind one of their key that was refused: (lanes, positions)."""

        self.move_on = f"""
UPDATE {outbox} AS m SET due_at = clock_timestamp()
FROM unnest(%s::bigint[], %s::text[], %s::text[]) AS moved (lane, destination, key)
CROSS JOIN LATERAL (
  SELECT next.position FROM {outbox} AS next
  WHERE next.held AND next.lane = moved.lane AND next.key = moved.key AND next.destination = moved.destination
  ORDER BY next.position LIMIT 1
) AS next
WHERE m.lane = moved.lane AND m.position = next.position
  AND NOT EXISTS (
    SELECT FROM {outbox} AS head
    WHERE head.held AND head.due_at < 'infinity'
      AND head.lane = moved.lane AND head.key = moved.key AND head.destination = moved.destination
  )
RETURNING m.lane"""
        """Have the next message of held keys be due, where one before it is gone: (lanes, destinations, keys)."""

        self.mend = f"""
WITH orphans AS MATERIALIZED (
  SELECT DISTINCT ON (lane, destination, key) lane, position FROM {outbox} AS m
  WHERE held AND NOT EXISTS (
    SELECT FROM {outbox} AS head
    WHERE head.held AND head.due_at < 'infinity'
      AND head.lane = m.lane AND head.key = m.key AND head.destination = m.destination
  )
  ORDER BY lane, destination, key, position
)
UPDATE {outbox} AS m SET due_at = clock_timestamp() FROM orphans
WHERE m.lane = orphans.lane AND m.position = orphans.position"""
        """Have held keys move on whose failed message somebody has deleted by hand."""

        # -- relays and what was sent -----------------------------------------------------------------------------

        self.report = f"""
INSERT INTO {relay} AS known (relay_id, host, pid, sent, failed, sent_per_second, outages, backend_pid)
VALUES (%s, %s, %s, %s, %s, %s, %s::jsonb, CASE WHEN pg_backend_pid() = %s::int THEN pg_backend_pid() END)
ON CONFLICT (relay_id) DO UPDATE
SET sent = excluded.sent, failed = excluded.failed, sent_per_second = excluded.sent_per_second,
  outages = excluded.outages, backend_pid = excluded.backend_pid, seen_at = now()"""
        """Report that a relay is at work: (id, host, pid, sent, failed, sent per second, outages as JSON, the server
        process that its connection was told). Behind a pooler, that is not the one that answers, and is not kept."""

        self.sign_off = f"DELETE FROM {relay} WHERE relay_id = %s OR seen_at < now() - interval '1 day'"
        """Report that a relay has ended, and forget those that did not: (id)."""

        self.purge_sent = f"""
WITH old AS MATERIALIZED (
  SELECT message_id, position FROM {sent} WHERE sent_at < now() - %s::interval
  ORDER BY sent_at LIMIT %s FOR UPDATE SKIP LOCKED
)
DELETE FROM {sent} AS kept USING old WHERE kept.message_id = old.message_id AND kept.position = old.position"""
        """Forget some of what was sent longer ago than this: (span, limit)."""

        self.outbox_message = outbox.replace("%%", "%")
        self.outbox_sent = sent.replace("%%", "%")
        self.outbox_relay = relay.replace("%%", "%")


# Settings of a sender's transaction, local to it, so that a pooler may stand between. If a crash of the server undoes
# that messages were forgotten which were sent, they are sent once more: that need not wait for the disk. Where one was
# refused, ``durable`` comes before the rest. No time-out of the host's may end a
# transaction that waits for a broker; ours does, when its relay stands still. And the plans must not hang on
# statistics: those of a queue are out of date as soon as they are made.
_SETTINGS = {
    "synchronous_commit": "'off'",
    "idle_in_transaction_session_timeout": "%s",
    "transaction_timeout": "'0'",
    "plan_cache_mode": "'force_generic_plan'",
    "enable_seqscan": "'off'",
    "enable_bitmapscan": "'off'",
    "enable_hashjoin": "'off'",
    "enable_mergejoin": "'off'",
    "enable_sort": "'off'",
}
_PLAN_SETTINGS = tuple(name for name in _SETTINGS if name.startswith(("enable_", "plan_")))


def _settings(*names: str) -> str:
    return ", ".join(f"set_config('{name}', {_SETTINGS[name]}, true)" for name in names)


@lru_cache(maxsize=64)
def outbox_statements(schema: str | None = None, prefix: str = "") -> OutboxStatements:
    """Return the statements for one place; the same object for the same arguments."""
    return OutboxStatements(schema, prefix)
