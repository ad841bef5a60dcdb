-- A subscriber's messages in the outbox: who works on which lanes, and how messages are read and settled.

-- ---------------------------------------------------------------------------------------------------------------------
-- Claims
--
-- One open transaction of each process holds its claims, so a pooler leaves its server to it. The locks are the
-- session's, so that lanes can be released one by one. It reads within a savepoint and rolls back to that: it keeps no
-- lock on a table and no snapshot. If the process does not run, or is cut off, the server ends it after a time.

-- All who want messages share this lock, so that they can be counted.
-- fragment: member
({{lock}} # (%(low)s::bigint - 1))

-- name: begin_claims
-- Set for how long this transaction may be idle, and that it may last. By its name, what forgets ids knows that it
-- records none, and does not wait for its end (still_running in txbox.maintenance).
-- parameters: idle_seconds text
-- returns: settings
SELECT set_config(name, value, true)
FROM (VALUES ('idle_in_transaction_session_timeout', %(idle_seconds)s || 's'), ('transaction_timeout', '0'),
  ('application_name', 'txbox-lane-claims')) AS wanted
  (name, value) JOIN pg_settings USING (name)

-- name: join_members
-- Be one of those who want messages.
-- parameters: low bigint (the destination's first lane)
-- returns: true
SELECT pg_try_advisory_lock_shared({{member}})

-- name: leave_members
-- Want no messages for now.
-- parameters: low bigint
-- returns: true
SELECT pg_advisory_unlock_shared({{member}})

-- name: count_members
-- How many want messages.
-- parameters: low bigint
-- returns: count
SELECT count(DISTINCT pid) FROM pg_locks
WHERE locktype = 'advisory' AND granted AND mode = 'ShareLock' AND objsubid = 1
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND classid::bigint = (({{member}} >> 32) & 4294967295) AND objid::bigint = ({{member}} & 4294967295)

-- name: claim_lanes
-- Claim so many of these lanes that nobody else has.
-- parameters: lanes bigint[], count bigint
-- returns: lane
SELECT lane FROM unnest(%(lanes)s::bigint[]) AS lane WHERE pg_try_advisory_lock({{lock}} # lane) LIMIT %(count)s::bigint

-- name: release_lanes
-- Release these lanes.
-- parameters: lanes bigint[]
-- returns: how many of them this session did not have
SELECT count(*) FROM unnest(%(lanes)s::bigint[]) AS lane WHERE NOT pg_advisory_unlock({{lock}} # lane)

-- ---------------------------------------------------------------------------------------------------------------------
-- Reading

-- name: take_over
-- What to know of lanes that were just claimed, before they are read.
-- parameters: lanes bigint[]
-- returns: lane, the highest position that may have been begun, the first transaction that had not begun
SELECT lane, coalesce(marked.begun_to, 0), pg_snapshot_xmax(pg_current_snapshot())::text::bigint
FROM unnest(%(lanes)s::bigint[]) AS lane LEFT JOIN {{inbox_lane}} AS marked USING (lane)

-- name: held_heads
-- The failed messages of these lanes that hold their keys.
-- parameters: lanes bigint[]
-- returns: lane, position, key, in how many seconds it is due
SELECT lane, position, key, greatest(extract(epoch FROM due_at) - extract(epoch FROM clock_timestamp()), 0)::float8
FROM {{outbox_message}} WHERE held AND due_at < 'infinity' AND lane = ANY(%(lanes)s::bigint[])

-- fragment: columns
m.lane, m.position, m.ctid::text AS place, m.transaction_id, m.message_id, m.body, m.key, m.headers::text,
    m.attempts, {{microseconds(m.published_at)}} AS published_at,
    CASE WHEN m.held THEN greatest(extract(epoch FROM m.due_at) - extract(epoch FROM clock_timestamp()), 0)::float8
    END AS due_in

-- name: read_lanes
-- Read what is to be processed in these lanes, in order, and with it what has failed and holds its place.
-- parameters: lanes text, positions text (to begin with), each_limit bigint (messages of each lane), bytes_limit bigint
--   (of all bodies)
-- returns: lane, position, place, transaction_id, message_id, body, key, headers, attempts, published_at, due_in (seconds;
--   null: at once); how many were found; the bytes before it
SELECT * FROM (
  SELECT {{columns}}, count(*) OVER () AS found,
    sum(octet_length(m.body)) OVER (ORDER BY m.position) - octet_length(m.body) AS bytes_before
  FROM unnest(%(lanes)s::text::bigint[], %(positions)s::text::bigint[]) AS wanted (lane, position)
  CROSS JOIN LATERAL (
    SELECT m.ctid, m.* FROM {{outbox_message}} AS m
    WHERE m.lane = wanted.lane AND m.position >= wanted.position AND (m.due_at IS NULL OR m.held)
    ORDER BY m.position LIMIT %(each_limit)s::bigint
  ) AS m
) AS found
WHERE bytes_before < %(bytes_limit)s::bigint ORDER BY position

-- name: read_again
-- Read messages that were read before.
-- parameters: lanes text, positions text
-- returns: lane, position, place, transaction_id, message_id, body, key, headers, attempts, published_at, due_in
SELECT {{columns}}
FROM unnest(%(lanes)s::text::bigint[], %(positions)s::text::bigint[]) AS wanted (lane, position)
JOIN {{outbox_message}} AS m ON m.lane = wanted.lane AND m.position = wanted.position
ORDER BY m.position

-- name: async_commit
-- Let the commit not wait for the disk.
-- parameters: none
-- returns: the setting
SELECT set_config('synchronous_commit', 'off', true)

-- name: mark_begun
-- Record up to which position messages of these lanes may be begun, before they are.
-- parameters: lanes bigint[], position bigint
-- returns: nothing
INSERT INTO {{inbox_lane}} AS marked (lane, begun_to)
SELECT lane, %(position)s::bigint FROM unnest(%(lanes)s::bigint[]) AS lane ORDER BY lane
ON CONFLICT (lane) DO UPDATE SET begun_to = excluded.begun_to WHERE marked.begun_to < excluded.begun_to

-- name: unmark
-- Record that this process has nothing of these lanes in progress: they are about to be released.
-- parameters: lanes bigint[], marks bigint[] (up to where an earlier one may have begun what is left)
-- returns: nothing
UPDATE {{inbox_lane}} AS marked SET begun_to = released.mark
FROM unnest(%(lanes)s::bigint[], %(marks)s::bigint[]) AS released (lane, mark)
WHERE marked.lane = released.lane AND marked.begun_to <> released.mark

-- ---------------------------------------------------------------------------------------------------------------------
-- Settling

-- name: plan_by_place
-- Have the next statement planned by place, however small the table is: its plan lasts while the table grows.
-- parameters: none
-- returns: the settings
SELECT set_config('txbox.enable_seqscan', current_setting('enable_seqscan'), true),
  set_config('enable_seqscan', 'off', true)

-- name: settle
-- Settle messages in the transaction that processes them, and take back what plan_by_place has set. Position and id
-- tell whether the message is still at its place. The subselects make the arrays once, and not for each row.
-- parameters: places text, positions text, ids text
-- returns: nothing
DELETE FROM {{outbox_message}} AS m
WHERE m.ctid = ANY((
    SELECT %(places)s::text::tid[]
    FROM set_config('enable_seqscan', current_setting('txbox.enable_seqscan'), true)
  )::tid[])
  AND m.position = ANY((SELECT %(positions)s::text::bigint[])::bigint[])
  AND m.message_id = ANY((SELECT %(ids)s::text::text[])::text[])

-- name: delete_messages
-- Settle messages after the transaction that processed or parked them.
-- parameters: lanes text, positions text
-- returns: nothing
DELETE FROM {{outbox_message}} AS m
USING unnest(%(lanes)s::text::bigint[], %(positions)s::text::bigint[]) AS gone (lane, position)
WHERE m.lane = gone.lane AND m.position = gone.position

-- name: postpone_messages
-- Postpone messages that have failed. Where the order of keys is kept, they hold their keys and their places; else they
-- wait like delayed ones.
-- parameters: lanes text, positions text, attempts text, errors text[], pauses text (seconds), ordered boolean
-- returns: nothing
UPDATE {{outbox_message}} AS m
SET attempts = greatest(m.attempts, failed.attempts), held = %(ordered)s::boolean AND m.key IS NOT NULL,
  error = failed.error, due_at = clock_timestamp() + failed.pause * interval '1 second'
FROM unnest(
  %(lanes)s::text::bigint[], %(positions)s::text::bigint[], %(attempts)s::text::int[], %(errors)s::text[],
  %(pauses)s::text::float8[]
) AS failed (lane, position, attempts, error, pause)
WHERE m.lane = failed.lane AND m.position = failed.position
