-- The transaction that merges one chunk. Statements with computed columns are in fresh_event.py.
--
-- Our temporary tables start with txbox_, so that they hide no table of the caller from the statements that apply the
-- events. Only fresh_event is meant to be seen by those statements.

-- name: prepare_session
-- Set up the transaction, and take the lock by which its run is found in pg_locks. Statements and transactions of a bulk
-- load may take long, but Postgres ends an idle transaction, and a statement whose client is gone. Analyzing a sample of
-- 30,000 rows twice takes an eighth of a chunk's time, so ours have 3,000.
-- parameters: work_mem text, stalled text (longest idleness, and longest wait for a lock), run_lock bigint
-- returns: the settings
SELECT set_config(name, '0', true) FROM pg_settings WHERE name IN ('statement_timeout', 'transaction_timeout')
UNION ALL
SELECT set_config(name, '10s', true) FROM pg_settings
WHERE name = 'client_connection_check_interval' AND current_setting('dynamic_shared_memory_type') <> 'windows'
UNION ALL
SELECT set_config('work_mem', %(work_mem)s, true)
UNION ALL
SELECT set_config('default_statistics_target', '10', true)
UNION ALL
SELECT set_config('idle_in_transaction_session_timeout', %(stalled)s, true)
UNION ALL
SELECT set_config('lock_timeout', %(stalled)s, true)
UNION ALL
SELECT pg_advisory_xact_lock_shared(%(run_lock)s)::text

-- name: claim_chunk
-- Claim a chunk. This waits for a transaction that has claimed the same chunk and has not ended. Of two attempts, one
-- merges the chunk, and the other finds it merged.
-- parameters: run_id text, chunk int
-- returns: nothing; the count of rows is 0 if the chunk is merged
INSERT INTO {{bulk_load_chunk}} (run_id, chunk) VALUES (%(run_id)s, %(chunk)s) ON CONFLICT DO NOTHING

-- name: waiting_copies
-- Return the COPYs of a run that began a while ago and wait for their client.
-- parameters: run_lock bigint, stalled text (how long ago they began at least)
-- returns: pid, received (bytes)
SELECT activity.pid, progress.bytes_processed AS received
FROM pg_locks AS lock
JOIN pg_stat_activity AS activity ON activity.pid = lock.pid
JOIN pg_stat_progress_copy AS progress ON progress.pid = lock.pid
WHERE lock.locktype = 'advisory' AND lock.objsubid = 1 AND lock.granted
  AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (lock.classid::bigint << 32 | lock.objid::bigint) = %(run_lock)s
  AND activity.wait_event = 'ClientRead' AND activity.query_start < now() - %(stalled)s::interval

-- name: end_session
-- End a session of the same role.
-- parameters: pid int
-- returns: whether the session existed
SELECT pg_terminate_backend(%(pid)s)

-- name: settle_chunk
-- Record a chunk's counts, in the transaction that merges it. Whoever records ids holds a lock on the inbox until its
-- transaction ends, also while it waits for ours.
-- parameters: rows_read bigint, rows_rejected bigint, already_processed bigint, applied bigint, parked bigint,
--   expired bigint, rejected_sample jsonb, run_id text, chunk int, tag bigint (the first 16 bits of any run's lock)
-- returns: whether a session that merges no chunk is recording ids
WITH held AS MATERIALIZED (
  SELECT pid, locktype, relation, mode, classid::bigint >> 16 AS tag FROM pg_locks
  WHERE database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
UPDATE {{bulk_load_chunk}}
SET rows_read = %(rows_read)s, rows_rejected = %(rows_rejected)s, already_processed = %(already_processed)s,
  applied = %(applied)s, parked = %(parked)s, expired = %(expired)s, rejected_sample = %(rejected_sample)s::jsonb,
  merged_at = clock_timestamp()
WHERE run_id = %(run_id)s AND chunk = %(chunk)s
RETURNING EXISTS (
  SELECT FROM held
  WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND relation = '{{literal(processed_message)}}'::regclass
    AND pid NOT IN (SELECT pid FROM held WHERE locktype = 'advisory' AND tag = %(tag)s)
)

-- name: rejected_so_far
-- Return how many rows a run's chunks have rejected.
-- parameters: run_id text
-- returns: a count
SELECT coalesce(sum(rows_rejected), 0)::bigint FROM {{bulk_load_chunk}} WHERE run_id = %(run_id)s

-- name: find_processed
-- Return which of these ids are in the inbox.
-- parameters: subscriber_id text, message_ids text[]
-- returns: message_id
SELECT message_id FROM {{processed_message}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = ANY(%(message_ids)s)

-- fragment: processed_in_range
{{processed_message}} AS processed
WHERE processed.subscriber_id = %(subscriber_id)s AND processed.message_id = event.message_id
  AND processed.message_id >= %(first_id)s
  AND (%(end_id)s::text IS NULL OR processed.message_id < %(end_id)s)

-- name: drop_processed
-- Delete the events whose ids are in the inbox from fresh_event. The primary key decides what is first; this only saves
-- it work. It reads only the chunk's own range of the inbox.
-- parameters: subscriber_id text, first_id text (of the chunk), end_id text (the first one beyond it, or null)
-- returns: nothing; the count of rows is that of the events dropped
DELETE FROM {{fresh_event}} AS event USING {{processed_in_range}}

-- name: unprocessed
-- Return the ids in fresh_event that the inbox lacks, up to a limit. (A LIMIT on the join itself makes Postgres look up
-- one id after another, which takes three times as long.) Hashing a million ids takes twice as long as a merge join,
-- because both sides are sorted already.
-- parameters: subscriber_id text, first_id text, end_id text, limit int
-- returns: message_id
WITH unprocessed AS MATERIALIZED (
  SELECT event.message_id FROM {{fresh_event}} AS event WHERE NOT EXISTS (SELECT FROM {{processed_in_range}})
)
SELECT message_id FROM unprocessed LIMIT %(limit)s

-- name: avoid_hashes
-- Stop the planner from using hash joins, in a transaction that reads only ids.
-- parameters: none
-- returns: nothing
SET LOCAL enable_hashjoin = off

-- name: any_horizon
-- Return whether the subscriber forgets what it has processed.
-- parameters: subscriber_id text
-- returns: a row, if it does
SELECT FROM {{inbox_horizon}} WHERE subscriber_id = %(subscriber_id)s

-- fragment: behind_horizon
-- Joined to events that are first, in a later statement than the one that found them first: see txbox.inbox.age_judge.
-- What was parked, and redriven since the horizon, was not processed.
{{inbox_horizon}} AS horizon
WHERE horizon.subscriber_id = %(subscriber_id)s AND NOT EXISTS (
  SELECT FROM {{dead_letter}} AS letter
  WHERE letter.subscriber_id = %(subscriber_id)s AND letter.message_id = event.message_id
    AND letter.redriven_at >= horizon.horizon AND letter.reason <> 'mismatch'
)

-- name: record
-- Record the fresh events, which are sorted. After a race it fails with 23505.
-- parameters: subscriber_id text
-- returns: nothing
INSERT INTO {{processed_message}} (subscriber_id, message_id) SELECT %(subscriber_id)s, message_id FROM {{fresh_event}}

-- name: create_recorded
-- Create the table of the ids that are recorded after a race.
-- parameters: none
-- returns: nothing
CREATE TEMPORARY TABLE pg_temp.txbox_recorded (message_id text COLLATE "C" NOT NULL) ON COMMIT DROP

-- name: record_raced
-- Record the fresh events that no other transaction has recorded meanwhile.
-- parameters: subscriber_id text
-- returns: nothing
WITH first AS (
  INSERT INTO {{processed_message}} (subscriber_id, message_id)
  SELECT %(subscriber_id)s, message_id FROM {{fresh_event}} ORDER BY message_id
  ON CONFLICT DO NOTHING
  RETURNING message_id
)
INSERT INTO pg_temp.txbox_recorded SELECT message_id FROM first

-- name: drop_unrecorded
-- Delete the events that another transaction has recorded from fresh_event.
-- parameters: none
-- returns: nothing; the count of rows is that of the events dropped
DELETE FROM {{fresh_event}} AS fresh
WHERE NOT EXISTS (SELECT FROM pg_temp.txbox_recorded AS recorded WHERE recorded.message_id = fresh.message_id)

-- name: analyze_fresh
-- Collect statistics on the fresh events, so that the planner has them for the caller's statements.
-- parameters: none
-- returns: nothing
ANALYZE {{fresh_event}}

-- fragment: effects_lock
hashtextextended('txbox bulk load ' || %(subscriber_id)s::text, '{{literal(processed_message)}}'::regclass::oid::bigint)

-- name: lock_effects
-- Wait until no other chunk of the subscriber applies its events. If pg_temp is late in the search path, a table of the
-- same name would hide fresh_event from the caller's statements. What those analyze is sampled with the session's setting.
-- parameters: subscriber_id text
-- returns: nothing, role, path (both to be restored), whether the caller's statements see fresh_event, and a setting
SELECT pg_advisory_xact_lock({{effects_lock}}), current_setting('role') AS role,
  current_setting('search_path') AS path,
  to_regclass('fresh_event') IS NOT DISTINCT FROM to_regclass('{{fresh_event}}'),
  (SELECT set_config(name, reset_val, true) FROM pg_settings WHERE name = 'default_statistics_target')

-- name: effects_holder
-- Return the session of the subscriber's chunk that applies its events.
-- parameters: subscriber_id text
-- returns: pid, virtualtransaction, state (null if this role may not see it)
SELECT lock.pid, lock.virtualtransaction, activity.state
FROM pg_locks AS lock LEFT JOIN pg_stat_activity AS activity ON activity.pid = lock.pid
WHERE lock.locktype = 'advisory' AND lock.objsubid = 1 AND lock.granted
  AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (lock.classid::bigint << 32 | lock.objid::bigint) = {{effects_lock}}

-- name: restore_settings
-- Undo what the caller's statements have set, for our own statements that follow.
-- parameters: role text, path text
-- returns: the settings
SELECT set_config('role', %(role)s, true), set_config('search_path', %(path)s, true)

-- name: any_parked
-- Return whether the subscriber has a dead letter that was not redriven. A discarded one counts, because its event is
-- not processed.
-- parameters: subscriber_id text
-- returns: a row, if there is one
SELECT FROM {{dead_letter}}
WHERE subscriber_id = %(subscriber_id)s AND redriven_at IS NULL AND reason <> 'mismatch' LIMIT 1

-- fragment: parked_events
JOIN {{dead_letter}} AS letter ON letter.message_id = event.message_id
JOIN {{processed_message}} AS processed
  ON processed.subscriber_id = letter.subscriber_id AND processed.message_id = letter.message_id
WHERE letter.subscriber_id = %(subscriber_id)s AND letter.redriven_at IS NULL AND processed.dead_letter_id IS NOT NULL
