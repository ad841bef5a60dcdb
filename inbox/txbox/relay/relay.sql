-- The relay: finds, claims, reads and settles the messages of the outbox, and reports that it is at work.

-- A crash of the server undoes commits that did not wait for the disk, and a relay that relies on what it found before
-- would go wrong. The postmaster may survive the crash; its statistics do not. Statistics are also reset without a
-- crash: then the whole outbox is read once more than needed, and ClaimSession recognises that. (Only the end of the
-- last recovery would tell the two apart for any user; but pg_last_wal_replay_lsn() fails on some servers, such as
-- Aurora.)
-- fragment: server
extract(epoch FROM pg_postmaster_start_time())::text || ' '
    || coalesce(extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time())::text, '')

-- Advisory locks share one space of numbers in a database: another outbox must get other numbers.
-- fragment: lock
('{{literal(outbox_message)}}'::regclass::oid::bigint << 31)

-- The plans must not depend on statistics: those of a queue are out of date as soon as they are collected.
-- fragment: plan_settings
set_config('plan_cache_mode', 'force_generic_plan', true), set_config('enable_seqscan', 'off', true),
  set_config('enable_bitmapscan', 'off', true), set_config('enable_hashjoin', 'off', true),
  set_config('enable_mergejoin', 'off', true), set_config('enable_sort', 'off', true)

-- ---------------------------------------------------------------------------------------------------------------------
-- Connections

-- name: missing_rights
-- Which rights on tables the user lacks.
-- parameters: tables text[] (quoted names), rights text[] (one for each)
-- returns: name, the rights that are missing
SELECT name, string_agg(right_to, ', ' ORDER BY position)
FROM unnest(%(tables)s::text[], %(rights)s::text[]) WITH ORDINALITY AS needed (name, right_to, position)
WHERE NOT has_table_privilege(name::regclass, right_to)
GROUP BY name ORDER BY name

-- name: default_isolation
-- The isolation level of a transaction that sets none.
-- parameters: none
-- returns: level
SHOW default_transaction_isolation

-- name: keep_idle_session
-- Keep the server from closing a connection that is idle for long: since PostgreSQL 14, a setting may do so.
-- parameters: none
-- returns: the setting, if the server has it
SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'idle_session_timeout'

-- ---------------------------------------------------------------------------------------------------------------------
-- Finding
--
-- What is new since the last poll is found by transactions, not by positions. A position is drawn when a row is
-- inserted and is seen when its transaction commits, and these are two different orders:
--
--   A   inserts 1 ───────────────────────────── commits
--   B       inserts 2 ── commits
--   relay                         sees 2             sees 1
--
-- A relay that remembered "seen up to 2" would never send 1. This one remembers the snapshot of its last poll. New is
-- what was inserted by a transaction that had not begun then (its number is not below the snapshot's xmax), or that was
-- in progress (its number is listed in it). Nothing else can have become visible since.
--
-- The scan begins behind what was read before. So deleted rows there do not slow it down, even while an old snapshot
-- keeps them from being removed.

-- Relays and the workers of each inbox: destination have lanes of their own, and find nothing in those of others. Only
-- what waits for a time is woken by whoever sees that it is due.
-- fragment: ours
lane BETWEEN %(low)s AND %(high)s

-- Infinity, which publish refuses but a person can insert, cannot be subtracted from a moment before PostgreSQL 17.
-- fragment: found
SELECT pg_current_snapshot()::text AS snapshot,
  {{server}} AS server,
  (SELECT array_agg(lane ORDER BY lane) FROM lanes) AS lanes,
  (SELECT array_agg(position ORDER BY lane) FROM lanes) AS positions,
  (SELECT extract(epoch FROM min(due_at))::float8 - extract(epoch FROM now())::float8 FROM {{outbox_message}}
   WHERE %(also_due)s AND due_at IS NOT NULL AND NOT held) AS due_in,
  ARRAY(
    SELECT DISTINCT lane FROM {{outbox_message}}
    WHERE %(also_due)s AND held AND due_at <= now() AND due_at < 'infinity' AND {{ours}}
  ) AS held_due

-- This server has not given out numbers above it yet. Rows restored from another server may have some: find_all finds
-- them.
-- fragment: ended
(SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint)

-- What a transaction in progress has written must not be read again and again.
-- fragment: ended_since
ARRAY(
    SELECT number FROM unnest(%(in_progress)s::bigint[]) AS number
    WHERE pg_visible_in_snapshot(number::text::xid8, pg_current_snapshot())
  )

-- name: find_new
-- Find what is new since the last poll.
-- parameters: xmax bigint (of the last snapshot), in_progress bigint[] (of the last snapshot), limit bigint, also_due
--   boolean (whether to look for what is due), low bigint, high bigint (the lanes to look in)
-- returns: this snapshot, which run of which server answers, the lanes of what is new, the first position in each, in
--   how many seconds the next delayed message is due, lanes with held keys that are due, how many messages were seen
WITH fresh AS MATERIALIZED (
  (SELECT lane, position FROM {{outbox_message}}
   WHERE due_at IS NULL AND transaction_id >= %(xmax)s AND transaction_id < {{ended}} AND {{ours}}
   ORDER BY transaction_id LIMIT %(limit)s)
  UNION ALL
  (SELECT lane, position FROM {{outbox_message}}
   WHERE due_at IS NULL AND transaction_id = ANY({{ended_since}}) AND {{ours}} ORDER BY transaction_id LIMIT %(limit)s)
), lanes AS (
  SELECT lane, min(position) AS position FROM fresh GROUP BY lane
)
{{found}}, (SELECT count(*) FROM fresh) AS seen

-- name: set_plan
-- Settings for find_burst, whose plan must not depend on statistics.
-- parameters: none
-- returns: the settings
SELECT {{plan_settings}}

-- name: find_burst
-- Find what is new if it is more than the limit of find_new.
-- parameters: xmax bigint, in_progress bigint[], also_due boolean, low bigint, high bigint
-- returns: as find_new, without the last
WITH lanes AS MATERIALIZED (
  SELECT lane, min(position) AS position FROM (
    SELECT lane, position FROM {{outbox_message}}
    WHERE due_at IS NULL AND transaction_id >= %(xmax)s AND transaction_id < {{ended}} AND {{ours}}
    UNION ALL
    SELECT lane, position FROM {{outbox_message}}
    WHERE due_at IS NULL AND transaction_id = ANY({{ended_since}}) AND {{ours}}
  ) AS fresh
  GROUP BY lane
)
{{found}}

-- name: find_all
-- Find everything. It jumps from lane to lane by the primary key, so it takes the same time with a thousand messages as
-- with sixteen million. It also finds a lane whose messages all wait.
-- parameters: also_due boolean, low bigint, high bigint
-- returns: as find_burst
WITH RECURSIVE lanes AS (
  (SELECT lane, position FROM {{outbox_message}} WHERE {{ours}} ORDER BY lane, position LIMIT 1)
  UNION ALL
  SELECT next.lane, next.position FROM lanes CROSS JOIN LATERAL (
    SELECT m.lane, m.position FROM {{outbox_message}} AS m
    WHERE m.lane > lanes.lane AND m.lane <= %(high)s ORDER BY m.lane, m.position LIMIT 1
  ) AS next
)
{{found}}

-- name: wake_due
-- Move messages that are due behind the others, as if they were published now. They are inserted again, sorted, so that
-- they get their positions in the order of their times. Only one relay does so at a time, so that those of another do
-- not come in between.
-- parameters: limit bigint
-- returns: nothing; the row count says how many
WITH turn AS MATERIALIZED (
  SELECT pg_try_advisory_xact_lock({{lock}} # -1) AS ours
), due AS MATERIALIZED (
  SELECT ctid AS place FROM {{outbox_message}}
  WHERE due_at <= now() AND NOT held AND (SELECT ours FROM turn)
  ORDER BY due_at, position LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), woken AS (
  DELETE FROM {{outbox_message}} WHERE ctid = ANY(ARRAY(SELECT place FROM due)) RETURNING *
)
INSERT INTO {{outbox_message}} (
  lane, message_id, destination, key, headers, body, due_at, published_at, attempts, error
)
SELECT lane, message_id, destination, key, headers, body, NULL,
  CASE WHEN lane < 0 AND attempts = 0 THEN greatest(published_at, due_at) ELSE published_at END, attempts, error
FROM woken ORDER BY woken.due_at, woken.position

-- name: repair_held_keys
-- Make held keys due if their failed message was deleted by hand.
-- parameters: none
-- returns: nothing
WITH orphans AS MATERIALIZED (
  SELECT DISTINCT ON (lane, destination, key) lane, position FROM {{outbox_message}} AS m
  WHERE held AND NOT EXISTS (
    SELECT FROM {{outbox_message}} AS head
    WHERE head.held AND head.due_at < 'infinity'
      AND head.lane = m.lane AND head.key = m.key AND head.destination = m.destination
  )
  ORDER BY lane, destination, key, position
)
UPDATE {{outbox_message}} AS m SET due_at = clock_timestamp() FROM orphans
WHERE m.lane = orphans.lane AND m.position = orphans.position

-- ---------------------------------------------------------------------------------------------------------------------
-- Claiming and reading
--
-- The settings of a sender's transaction are local to it, so that a pooler may be in between. If a crash of the server
-- undoes the deletion of messages that were sent, they are sent once more: that commit need not wait for the disk. If a
-- message was refused, wait_for_disk comes before the rest. No timeout of the host's may end a transaction that waits
-- for a broker; ours does, if its relay is suspended or cut off.

-- fragment: settings
set_config('synchronous_commit', 'off', true),
  set_config('idle_in_transaction_session_timeout', %(idle_timeout_milliseconds)s, true),
  {{plan_settings}}

-- fragment: answering
{{server}} AS server, current_setting('transaction_read_only') = 'on' AS read_only

-- fragment: claimed
{{settings}}, {{answering}},
  set_config('txbox.lanes', ARRAY(
    SELECT lane FROM unnest(%(lanes)s::bigint[]) AS lane
    WHERE pg_try_advisory_xact_lock({{lock}} # lane)
  )::text, true)::bigint[] AS lanes

-- name: claim
-- Claim those of these lanes that no other relay works on, until the transaction ends, however it ends. This waits for
-- no lock, writes nothing, and holds no snapshot while messages are sent. A setting tells read_fresh, which is sent in
-- the same round trip, which lanes these are.
-- parameters: idle_timeout_milliseconds text (after which the server ends an idle transaction), lanes bigint[]
-- returns: settings; and last: which run of which server answers, whether the transaction is read-only, the lanes
SELECT {{claimed}}

-- name: claim_timed
-- The same for PostgreSQL 17 and later, which can limit the time of a transaction.
-- parameters: idle_timeout_milliseconds text, lanes bigint[]
-- returns: as claim
SELECT set_config('transaction_timeout', '0', true), {{claimed}}

-- name: lock_lanes
-- Claim those of these lanes that no other relay works on, for the session, so that each can be released by itself: the
-- transaction of an async sender holds the lanes of many destinations, which answer at different times. It runs in a
-- transaction that ``claim`` has begun, without lanes: behind a pooler, the session is this relay's for that long. The
-- statistics that a transaction has seen would not change unless it forgot them first.
-- parameters: lanes bigint[]
-- returns: nothing; and last: which run of which server answers, whether the transaction is read-only, the lanes
SELECT pg_stat_clear_snapshot(), {{answering}},
  set_config('txbox.lanes', ARRAY(
    SELECT lane FROM unnest(%(lanes)s::bigint[]) AS lane WHERE pg_try_advisory_lock({{lock}} # lane)
  )::text, true)::bigint[] AS lanes

-- name: unlock_lanes
-- Release lanes that lock_lanes has claimed.
-- parameters: lanes bigint[]
-- returns: how many of them this session did not have
SELECT count(*) FROM unnest(%(lanes)s::bigint[]) AS lane WHERE NOT pg_advisory_unlock({{lock}} # lane)

-- name: which_server
-- Which run of which server answers now.
-- parameters: none
-- returns: nothing, server
SELECT pg_stat_clear_snapshot(), {{server}}

-- name: claim_stands
-- Fail if the transaction has been ended from outside.
-- parameters: none
-- returns: a row of no columns
SELECT

-- name: drop_snapshot
-- Sent behind another statement, in the same round trip: until the next statement, the server keeps the snapshot of one
-- whose answer was not fetched by simple query. SHOW takes no snapshot.
-- parameters: none
-- returns: a setting
SHOW transaction_isolation

-- name: begin_reading
-- The transaction of an async sender lasts as long as its calls and settles nothing, so what it reads must not stay
-- locked. A change of the table's structure would wait for it, a settlement for that change, and it for the settlement.
-- parameters: none
-- returns: nothing
SAVEPOINT txbox_reading

-- name: end_reading
-- Release the locks of tables, and the snapshot, taken since begin_reading. Locks of lanes stay: they are the
-- session's.
-- parameters: none
-- returns: nothing
ROLLBACK TO SAVEPOINT txbox_reading

-- fragment: message
m.lane, m.position, m.held, m.message_id, m.destination, m.body, m.key, m.headers::text,
    m.attempts, {{microseconds(m.published_at)}} AS published_at,
    CASE WHEN isfinite(m.published_at) THEN extract(epoch FROM clock_timestamp() - m.published_at) ELSE 0
    END::float8 AS age,
    sum(octet_length(m.body)) OVER (ORDER BY m.position) - octet_length(m.body) AS bytes_before

-- name: read_fresh
-- Read new messages in order, from those of these lanes that this transaction has claimed.
-- parameters: lanes bigint[], positions bigint[] (to begin with), each_limit bigint (messages of each lane),
--   bytes_limit bigint (of all bodies)
-- returns: the message's columns, its age in seconds, the bytes of all before it, whether any key of these lanes is
--   held
SELECT *, EXISTS (SELECT FROM {{outbox_message}} WHERE held AND lane = ANY(%(lanes)s::bigint[])) AS any_held FROM (
  SELECT {{message}} FROM unnest(%(lanes)s::bigint[], %(positions)s::bigint[]) AS wanted (lane, position)
  CROSS JOIN LATERAL (
    SELECT * FROM {{outbox_message}} AS m
    WHERE m.lane = wanted.lane AND m.position >= wanted.position AND m.due_at IS NULL
    ORDER BY m.position LIMIT %(each_limit)s
  ) AS m
  WHERE wanted.lane = ANY((SELECT current_setting('txbox.lanes')::bigint[])::bigint[])
) AS found
WHERE bytes_before < %(bytes_limit)s ORDER BY position

-- name: held_keys
-- Which of these keys are held.
-- parameters: lanes bigint[], destinations text[], keys text[]
-- returns: lane, destination, key
SELECT lane, destination, key
FROM unnest(%(lanes)s::bigint[], %(destinations)s::text[], %(keys)s::text[]) AS k (lane, destination, key)
WHERE EXISTS (
  SELECT FROM {{outbox_message}} AS m
  WHERE m.held AND m.lane = k.lane AND m.key = k.key AND m.destination = k.destination
)

-- name: due_keys
-- Held keys of claimed lanes that are due. The transaction may have begun before they were.
-- parameters: lanes bigint[], limit bigint
-- returns: lane, destination, key
SELECT lane, destination, key FROM {{outbox_message}}
WHERE held AND due_at <= statement_timestamp() AND due_at < 'infinity' AND lane = ANY(%(lanes)s::bigint[])
ORDER BY due_at LIMIT %(limit)s

-- name: read_due
-- Read the messages of held keys that are due.
-- parameters: lanes bigint[], destinations text[], keys text[], each_limit bigint (messages of each key), bytes_limit
--   bigint
-- returns: as read_fresh, without the last
SELECT * FROM (
  SELECT {{message}}
  FROM unnest(%(lanes)s::bigint[], %(destinations)s::text[], %(keys)s::text[]) AS wanted (lane, destination, key)
  CROSS JOIN LATERAL (
    SELECT * FROM {{outbox_message}} AS m
    WHERE m.held AND m.lane = wanted.lane AND m.key = wanted.key AND m.destination = wanted.destination
    ORDER BY m.position LIMIT %(each_limit)s
  ) AS m
) AS found
WHERE bytes_before < %(bytes_limit)s ORDER BY position

-- ---------------------------------------------------------------------------------------------------------------------
-- Settling
--
-- Lanes and positions come as the text of an array: that costs the client a fifth of what psycopg takes to write it
-- value by value.

-- name: wait_for_disk
-- Make this transaction's commit wait for the disk again, whatever the user's default is.
-- parameters: none
-- returns: the setting
SELECT set_config('synchronous_commit', CASE reset_val WHEN 'off' THEN 'on' ELSE reset_val END, true)
FROM pg_settings WHERE name = 'synchronous_commit'

-- name: delete_messages
-- Delete messages that were sent.
-- parameters: lanes text, positions text
-- returns: nothing
DELETE FROM {{outbox_message}} AS m
USING unnest(%(lanes)s::text::bigint[], %(positions)s::text::bigint[]) AS gone (lane, position)
WHERE m.lane = gone.lane AND m.position = gone.position

-- name: take_messages
-- Delete messages that are about to be parked.
-- parameters: lanes text, positions text
-- returns: lane, position; without those that were already parked by a settlement whose answer was lost
DELETE FROM {{outbox_message}} AS m
USING unnest(%(lanes)s::text::bigint[], %(positions)s::text::bigint[]) AS dead (lane, position)
WHERE m.lane = dead.lane AND m.position = dead.position
RETURNING m.lane, m.position

-- name: keep_messages
-- Move messages that were sent to outbox_sent.
-- parameters: lanes text, positions text
-- returns: nothing
WITH sent AS (
  DELETE FROM {{outbox_message}} AS m
  USING unnest(%(lanes)s::text::bigint[], %(positions)s::text::bigint[]) AS gone (lane, position)
  WHERE m.lane = gone.lane AND m.position = gone.position
  RETURNING m.message_id, m.position, m.destination, m.key, m.headers, m.body, m.published_at
)
INSERT INTO {{outbox_sent}} (message_id, position, destination, key, headers, body, published_at)
SELECT message_id, position, destination, key, headers, body, published_at FROM sent
ON CONFLICT DO NOTHING

-- name: postpone_messages
-- Postpone refused messages, and hold their keys.
-- parameters: lanes text, positions text, errors text[], pauses interval[], attempts int[] (of each, including this
--   one; not added to the stored number: a settlement whose COMMIT was applied but whose answer was lost is tried
--   again)
-- returns: nothing
UPDATE {{outbox_message}} AS m
SET attempts = greatest(m.attempts, refused.attempts), held = m.key IS NOT NULL, error = refused.error,
  due_at = clock_timestamp() + refused.pause
FROM unnest(
  %(lanes)s::text::bigint[], %(positions)s::text::bigint[], %(errors)s::text[], %(pauses)s::interval[],
  %(attempts)s::int[]
) AS refused (lane, position, error, pause, attempts)
WHERE m.lane = refused.lane AND m.position = refused.position

-- name: hold_messages
-- Hold messages behind a refused one of their key.
-- parameters: lanes text, positions text
-- returns: nothing
UPDATE {{outbox_message}} AS m SET held = true, due_at = 'infinity'
FROM unnest(%(lanes)s::text::bigint[], %(positions)s::text::bigint[]) AS behind (lane, position)
WHERE m.lane = behind.lane AND m.position = behind.position

-- name: release_keys
-- Make the next message of held keys due, if the one before it is gone.
-- parameters: lanes bigint[], destinations text[], keys text[]
-- returns: lane
UPDATE {{outbox_message}} AS m SET due_at = clock_timestamp()
FROM unnest(%(lanes)s::bigint[], %(destinations)s::text[], %(keys)s::text[]) AS moved (lane, destination, key)
CROSS JOIN LATERAL (
  SELECT next.position FROM {{outbox_message}} AS next
  WHERE next.held AND next.lane = moved.lane AND next.key = moved.key AND next.destination = moved.destination
  ORDER BY next.position LIMIT 1
) AS next
WHERE m.lane = moved.lane AND m.position = next.position
  AND NOT EXISTS (
    SELECT FROM {{outbox_message}} AS head
    WHERE head.held AND head.due_at < 'infinity'
      AND head.lane = moved.lane AND head.key = moved.key AND head.destination = moved.destination
  )
RETURNING m.lane

-- ---------------------------------------------------------------------------------------------------------------------
-- Reporting

-- name: paused_destinations
-- Which destinations are paused.
-- parameters: none
-- returns: name, paused_by, note
SELECT name, paused_by, note FROM {{paused}} WHERE kind = 'destination'

-- name: report
-- Report that a relay is at work, and add what it has sent since its last report to the activity of this minute. The
-- last report is read from the relay's row, so a report whose answer was lost is not added twice. If the relay has
-- forgotten a destination meanwhile, that is counted from 0 again. The process id that the server reported when the
-- connection was made is kept only if that process answers: behind a pooler, it is another one.
-- parameters: relay_id text, host text, pid int, sent bigint, failed bigint, sent_per_second double precision, outages
--   text (JSON), backend_pid int (as reported when the connection was made), version text, state text, destinations
--   text (JSON), sent_before bigint, failed_before bigint (not to be added, if there is no report before)
-- returns: nothing
WITH before AS (
  SELECT sent, failed, destinations FROM {{outbox_relay}} WHERE relay_id = %(relay_id)s
  UNION ALL SELECT %(sent_before)s::bigint, %(failed_before)s::bigint, '{}'
  WHERE NOT EXISTS (SELECT FROM {{outbox_relay}} WHERE relay_id = %(relay_id)s)
), difference AS (
  SELECT 'outbox' AS kind, '' AS name, figure, count FROM before, LATERAL (
    VALUES ('sent', %(sent)s::bigint - before.sent), ('failed', %(failed)s::bigint - before.failed)
  ) AS total (figure, count)
  UNION ALL
  SELECT 'destination', name, 'sent', CASE WHEN value::bigint >= counted THEN value::bigint - counted ELSE value::bigint END
  FROM before, jsonb_each_text(%(destinations)s::jsonb) AS now_counted (name, value),
    LATERAL (SELECT coalesce((before.destinations ->> name)::bigint, 0) AS counted) AS earlier
), added AS (
  INSERT INTO {{reported_activity}} AS act (kind, name, minute, figure, count)
  SELECT kind, name, to_timestamp(floor(extract(epoch FROM now()) / 60) * 60), figure, count
  FROM difference WHERE count > 0 ORDER BY kind COLLATE "C", name COLLATE "C", figure COLLATE "C"
  ON CONFLICT (kind, name, minute, figure) DO UPDATE SET count = act.count + excluded.count
)
INSERT INTO {{outbox_relay}} AS reported (
  relay_id, host, pid, sent, failed, sent_per_second, outages, backend_pid, version, state, destinations
)
VALUES (
  %(relay_id)s, %(host)s, %(pid)s, %(sent)s, %(failed)s, %(sent_per_second)s, %(outages)s::jsonb,
  CASE WHEN pg_backend_pid() = %(backend_pid)s::int THEN pg_backend_pid() END, %(version)s, %(state)s,
  %(destinations)s::jsonb
)
ON CONFLICT (relay_id) DO UPDATE
SET sent = excluded.sent, failed = excluded.failed, sent_per_second = excluded.sent_per_second,
  outages = excluded.outages, backend_pid = excluded.backend_pid, state = excluded.state,
  destinations = excluded.destinations, seen_at = now()

-- name: take_turn
-- Make the reports of one relay take turns until this transaction ends. Otherwise the next report would not see one
-- whose COMMIT arrives late, and would add the same again.
-- parameters: relay_id text
-- returns: nothing
SELECT pg_advisory_xact_lock(hashtextextended(%(relay_id)s, 0))

-- name: delete_row
-- Delete the row of a relay that ends, rows of relays that have not reported for a day, and activity older than it is
-- kept.
-- parameters: relay_id text, kept interval
-- returns: nothing
WITH old AS (
  DELETE FROM {{reported_activity}} WHERE kind IN ('destination', 'outbox') AND minute < now() - %(kept)s::interval
)
DELETE FROM {{outbox_relay}} WHERE relay_id = %(relay_id)s OR seen_at < now() - interval '1 day'
