-- The ledger in Postgres: each statement is one atomic step in its own transaction.
--
-- The clock is the database's. It is clock_timestamp() and not now(): a statement that waited for a row counts from
-- when it has the row, not from when it was sent.
--
-- How a lease is fenced: acquire gives out fences (new_fence), and every other step is carried out for the newest fence
-- only (newest_fence).

-- fragment: durable
-- True, and makes this transaction's commit durable, on a synchronous standby too if there is one, whatever
-- synchronous_commit the role, the database or the connection has. In a WHERE, it needs no round trip of its own.
set_config('synchronous_commit', CASE current_setting('synchronous_commit')
  WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true) IS NOT NULL

-- fragment: from_now
clock_timestamp() + make_interval(secs => %(lease_seconds)s::double precision)

-- fragment: in_full
clock_timestamp() + make_interval(secs => lease.lease_seconds)

-- fragment: server_time
-- Microseconds, not seconds: the number of digits of a float depends on the session's extra_float_digits.
(extract(epoch FROM clock_timestamp()) * 1000000)::bigint

-- fragment: now_at_most
-- The time as it would be if the clock had not been set forward lately; latest is null before the first answer.
least(clock_timestamp(), to_timestamp(%(latest)s::double precision))

-- fragment: timeline
-- The server's timeline: the first eight hexadecimal digits of a WAL file's name. Postgres increments it whenever a
-- standby is promoted or a backup recovered.
('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint

-- fragment: milliseconds
floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint

-- fragment: new_fence
-- A fence is the server's timeline, and below it 44 bits of the database's clock in milliseconds (until the year 2527;
-- above them is room for 2**19 timelines). It is always greater than the row's own. So a promoted server gives out no
-- fence that the old one gave out, not even one that was not replicated; a sequence would repeat what was lost. The
-- clock covers rows that were deleted, servers that do not show their timeline, and rows whose fence has a timeline
-- above the server's: from a restored dump, or from before pg_upgrade. Such a row keeps its timeline and takes the
-- clock below it (greater_fence). There the clock of each promoted server counts as 2**22 ms, 70 minutes, later, and
-- may be that much behind.
({{timeline}} << 44) + {{milliseconds}} + ({{timeline}} << 22)

-- fragment: greater_fence
greatest(excluded.fence, lease.fence + 1, ((lease.fence >> 44) << 44) | (excluded.fence & ((1::bigint << 44) - 1)))

-- fragment: newest_fence
lease.subscriber_id = %(subscriber_id)s AND lease.message_id = %(message_id)s AND lease.fence = %(fence)s

-- fragment: acquire_with
-- The conditions are evaluated when the row is locked, in its newest version. So if two find an expired lease, the
-- second one finds the lease of the first:
--
--   A  INSERT ... ON CONFLICT: locks the row, it has expired: takes it -- commits
--   B        INSERT ... ON CONFLICT: waits for the row -----------------------+ in flight: nothing is updated
--
-- The fence is computed before that wait, and may be smaller than one that was computed and used meanwhile: so the
-- row's own fence counts too.
acquired AS (
  INSERT INTO {{message_lease}} AS lease
    (subscriber_id, message_id, fence, attempts, owner, fingerprint, acquired_at, expires_at, lease_seconds)
  SELECT %(subscriber_id)s, %(message_id)s, new.fence, 1, %(owner)s, %(fingerprint)s::bytea, clock_timestamp(),
    {{from_now}}, %(lease_seconds)s
  FROM new
  WHERE {{durable}}
  ON CONFLICT (subscriber_id, message_id) DO UPDATE SET
    fence = {{greater_fence}},
    attempts = lease.attempts + 1,
    owner = excluded.owner,
    fingerprint = coalesce(lease.fingerprint, excluded.fingerprint),
    acquired_at = clock_timestamp(),
    expires_at = {{from_now}},
    lease_seconds = excluded.lease_seconds
  WHERE lease.completed_at IS NULL
    AND (lease.expires_at IS NULL OR lease.expires_at <= {{now_at_most}})
    AND (lease.fingerprint IS NULL OR excluded.fingerprint IS NULL OR lease.fingerprint = excluded.fingerprint)
  RETURNING fence, attempts, attempts - 1 - failures + unknown_before AS unknown
)
SELECT fence, attempts, unknown, {{server_time}},
  NULL::bool, NULL::double precision, NULL::double precision, NULL::bytea, NULL::bytea FROM acquired
UNION ALL
SELECT lease.fence, NULL, NULL, {{server_time}}, lease.completed_at IS NOT NULL,
  extract(epoch FROM lease.expires_at - {{now_at_most}})::double precision, lease.lease_seconds,
  lease.result, lease.fingerprint
FROM {{message_lease}} AS lease
WHERE lease.subscriber_id = %(subscriber_id)s AND lease.message_id = %(message_id)s AND NOT EXISTS (SELECT FROM acquired)

-- name: acquire
-- Ask for a lease. The second part of the answer is as old as the statement's snapshot: it may lack a row that the
-- first part has just waited for, or show it as free; then the caller must ask again.
-- parameters: subscriber_id text, message_id text, owner text, fingerprint bytea or null, lease_seconds double precision,
--   latest double precision or null (the server's time at most: seconds since 1970)
-- returns: fence, attempts, unknown attempts, the server's time in microseconds, if it is ours; or else fence, null,
--   null, the server's time, completed, seconds left, the lease's length in seconds, result, fingerprint
WITH new AS MATERIALIZED (SELECT {{new_fence}} AS fence), {{acquire_with}}

-- name: acquire_by_clock
-- Ask for a lease on a server that does not show its timeline: as acquire, with a fence of the clock alone.
-- parameters: subscriber_id text, message_id text, owner text, fingerprint bytea or null, lease_seconds double precision,
--   latest double precision or null (the server's time at most: seconds since 1970)
-- returns: as acquire
WITH new AS MATERIALIZED (SELECT {{milliseconds}} AS fence), {{acquire_with}}

-- name: read_timeline
-- Read the server's timeline after an acquisition was refused, to see whether that is the reason.
-- parameters: none
-- returns: a number
SELECT {{timeline}}

-- name: renew
-- Renew a lease, if it is the newest, whether or not it has run out.
-- parameters: subscriber_id text, message_id text, fence bigint, lease_seconds double precision
-- returns: the server's time in microseconds; no row if the lease is lost
UPDATE {{message_lease}} AS lease SET expires_at = {{from_now}}, lease_seconds = %(lease_seconds)s
WHERE {{newest_fence}} AND lease.expires_at IS NOT NULL AND {{durable}}
RETURNING {{server_time}}

-- name: shorten
-- Shorten another owner's lease to its length from now, if it lasts longer: it was given before the clock was set back.
-- Its owner counts from before now, so this takes nothing from it.
-- parameters: subscriber_id text, message_id text, fence bigint
-- returns: nothing; the count of rows
UPDATE {{message_lease}} AS lease SET expires_at = {{in_full}}
WHERE {{newest_fence}} AND lease.expires_at > {{in_full}} AND {{durable}}

-- name: complete
-- Complete a message if the lease is the newest; the same lease may do so again if the answer was lost.
-- parameters: subscriber_id text, message_id text, fence bigint, result bytea or null
-- returns: nothing; the count of rows, 0 if the lease is lost
UPDATE {{message_lease}} AS lease SET
  expires_at = NULL,
  completed_at = coalesce(lease.completed_at, clock_timestamp()),
  result = CASE WHEN lease.completed_at IS NULL THEN %(result)s ELSE lease.result END
WHERE {{newest_fence}} AND coalesce(lease.expires_at, lease.completed_at) IS NOT NULL AND {{durable}}

-- name: release
-- Free a message whose attempt has not completed it, if the lease is the newest. Repeated by the same lease, it changes
-- nothing. For a failed attempt, attempts, failures and uncounted are 0, 1 and 0.
-- parameters: subscriber_id text, message_id text, fence bigint, attempts int (to add), failures int (to add),
--   uncounted int (attempts of unknown effect that leave the count), forget bool (begin to count anew),
--   unknown_now int (attempts of unknown effect that are not forgotten)
-- returns: nothing; the count of rows, 0 if the lease is lost
UPDATE {{message_lease}} AS lease SET
  expires_at = NULL,
  attempts = CASE WHEN %(forget)s THEN 0 WHEN lease.expires_at IS NULL THEN lease.attempts
    ELSE lease.attempts + %(attempts)s END,
  failures = CASE WHEN %(forget)s THEN 0 WHEN lease.expires_at IS NULL THEN lease.failures
    ELSE lease.failures + %(failures)s END,
  unknown_before = CASE WHEN %(forget)s THEN %(unknown_now)s WHEN lease.expires_at IS NULL THEN lease.unknown_before
    ELSE lease.unknown_before + %(uncounted)s END
WHERE {{newest_fence}} AND lease.completed_at IS NULL AND {{durable}}

-- name: counts
-- Counts of each subscriber's leases, by state.
-- parameters: none
-- returns: subscriber_id, completed, in flight, run out, failed, the age in seconds of the oldest attempt under way
SELECT subscriber_id,
  count(*) FILTER (WHERE completed_at IS NOT NULL),
  count(*) FILTER (WHERE expires_at > clock_timestamp()),
  count(*) FILTER (WHERE expires_at <= clock_timestamp()),
  count(*) FILTER (WHERE completed_at IS NULL AND expires_at IS NULL),
  extract(
    epoch FROM clock_timestamp() - min(least(acquired_at, clock_timestamp())) FILTER (WHERE expires_at IS NOT NULL)
  )::double precision
FROM {{message_lease}} GROUP BY subscriber_id ORDER BY subscriber_id
