-- The transaction that merges one chunk. The statements with computed columns are in fresh_event.py.
--
-- Tables of ours that live for one transaction start with txbox_, so that none of the caller's is hidden from the
-- statements that apply the events; fresh_event is the one that those statements are meant to see.

-- name: prepare_session
-- Settings of the transaction, and the lock by which its run is found in pg_locks. A statement of a bulk load may take
-- long, and so may all of them; a transaction that is idle is ended, and so is a statement whose client is gone. To
-- analyze a sample of 30,000 rows, twice, takes an eighth of a chunk's time: ours are of 3,000.
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
-- Claim a chunk. It waits for a transaction that has claimed the same chunk and has not ended: of two attempts, one
-- merges, and the other finds it merged.
-- parameters: run_id text, chunk int
-- returns: nothing; the count of rows is 0 if the chunk is merged
INSERT INTO {{bulk_load_chunk}} (run_id, chunk) VALUES (%(run_id)s, %(chunk)s) ON CONFLICT DO NOTHING

-- name: waiting_copies
-- COPYs of a run that have begun a while ago and wait for their client.
-- parameters: run_lock bigint, stalled text (how long ago they have begun, at least)
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
-- returns: whether it was there
SELECT pg_terminate_backend(%(pid)s)

-- name: settle_chunk
-- Record what a chunk came to, in the transaction that merges it.
-- parameters: rows_read bigint, rows_rejected bigint, already_processed bigint, applied bigint, parked bigint,
--   expired bigint, rejected_sample jsonb, run_id text, chunk int
-- returns: nothing
UPDATE {{bulk_load_chunk}}
SET rows_read = %(rows_read)s, rows_rejected = %(rows_rejected)s, already_processed = %(already_processed)s,
  applied = %(applied)s, parked = %(parked)s, expired = %(expired)s, rejected_sample = %(rejected_sample)s::jsonb,
  merged_at = clock_timestamp()
WHERE run_id = %(run_id)s AND chunk = %(chunk)s

-- name: rejected_so_far
-- How many rows of a run's chunks were rejected.
-- parameters: run_id text
-- returns: a count
SELECT coalesce(sum(rows_rejected), 0)::bigint FROM {{bulk_load_chunk}} WHERE run_id = %(run_id)s

-- name: find_processed
-- Which of these ids are in the inbox.
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
-- Leave no event in fresh_event whose id is in the inbox. The primary key decides what is first; this only saves it the
-- work. It reads the chunk's own range of the inbox.
-- parameters: subscriber_id text, first_id text (of the chunk), end_id text (the first one beyond it, or null)
-- returns: nothing; the count of rows is that of the events dropped
DELETE FROM {{fresh_event}} AS event USING {{processed_in_range}}

-- name: unprocessed
-- The ids in fresh_event that are not in the inbox, up to a limit. (A LIMIT on the join itself makes Postgres look up id
-- after id, which takes three times as long.) A hash of a million ids takes twice the time of a merge: both sides are
-- sorted already.
-- parameters: subscriber_id text, first_id text, end_id text, limit int
-- returns: message_id
WITH unprocessed AS MATERIALIZED (
  SELECT event.message_id FROM {{fresh_event}} AS event WHERE NOT EXISTS (SELECT FROM {{processed_in_range}})
)
SELECT message_id FROM unprocessed LIMIT %(limit)s

-- name: avoid_hashes
-- Have the planner join without hashes, in a transaction that reads ids alone.
-- parameters: none
-- returns: nothing
SET LOCAL enable_hashjoin = off

-- name: any_horizon
-- Whether the subscriber forgets what it has processed.
-- parameters: subscriber_id text
-- returns: a row, if it does
SELECT FROM {{inbox_horizon}} WHERE subscriber_id = %(subscriber_id)s

-- fragment: behind_horizon
-- Joined to events that are first, in a statement that is later than the one that has found them to be: see
-- txbox.inbox.age_judge. What was parked, and redriven since the horizon, was not processed.
{{inbox_horizon}} AS horizon
WHERE horizon.subscriber_id = %(subscriber_id)s AND NOT EXISTS (
  SELECT FROM {{dead_letter}} AS letter
  WHERE letter.subscriber_id = %(subscriber_id)s AND letter.message_id = event.message_id
    AND letter.redriven_at >= horizon.horizon AND letter.reason <> 'mismatch'
)

-- name: record
-- Record the fresh events, which are sorted. A race ends it with 23505.
-- parameters: subscriber_id text
-- returns: nothing
INSERT INTO {{processed_message}} (subscriber_id, message_id) SELECT %(subscriber_id)s, message_id FROM {{fresh_event}}

-- name: create_recorded
-- Create the table of what was recorded after a race.
-- parameters: none
-- returns: nothing
CREATE TEMPORARY TABLE pg_temp.txbox_recorded (message_id text COLLATE "C" NOT NULL) ON COMMIT DROP

-- name: record_raced
-- Record those of the fresh events that no other transaction has recorded meanwhile.
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
-- Leave no event in fresh_event that another transaction has recorded.
-- parameters: none
-- returns: nothing; the count of rows is that of the events dropped
DELETE FROM {{fresh_event}} AS fresh
WHERE NOT EXISTS (SELECT FROM pg_temp.txbox_recorded AS recorded WHERE recorded.message_id = fresh.message_id)

-- name: analyze_fresh
-- Give the planner the statistics of the fresh events, for the caller's statements.
-- parameters: none
-- returns: nothing
ANALYZE {{fresh_event}}

-- fragment: effects_lock
hashtextextended('txbox bulk load ' || %(subscriber_id)s::text, '{{literal(processed_message)}}'::regclass::oid::bigint)

-- name: lock_effects
-- Wait until no other chunk of the subscriber applies its events. With pg_temp late in the search path, a table of the
-- same name would hide fresh_event from the caller's statements. What those analyze is sampled as the session has it.
-- parameters: subscriber_id text
-- returns: nothing, role, path (both to be set back), whether the caller's statements see fresh_event, and a setting
SELECT pg_advisory_xact_lock({{effects_lock}}), current_setting('role') AS role,
  current_setting('search_path') AS path,
  to_regclass('fresh_event') IS NOT DISTINCT FROM to_regclass('{{fresh_event}}'),
  (SELECT set_config(name, reset_val, true) FROM pg_settings WHERE name = 'default_statistics_target')

-- name: effects_holder
-- The chunk of the subscriber that applies its events.
-- parameters: subscriber_id text
-- returns: pid, virtualtransaction, state (null if this role may not see it)
SELECT lock.pid, lock.virtualtransaction, activity.state
FROM pg_locks AS lock LEFT JOIN pg_stat_activity AS activity ON activity.pid = lock.pid
WHERE lock.locktype = 'advisory' AND lock.objsubid = 1 AND lock.granted
  AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (lock.classid::bigint << 32 | lock.objid::bigint) = {{effects_lock}}

-- name: restore_settings
-- Take back what the caller's statements have set, for our own that follow.
-- parameters: role text, path text
-- returns: the settings
SELECT set_config('role', %(role)s, true), set_config('search_path', %(path)s, true)

-- name: any_parked
-- Whether the subscriber has a dead letter that was not redriven. A discarded one counts: its event is not processed.
-- parameters: subscriber_id text
-- returns: a row, if there is one
SELECT FROM {{dead_letter}}
WHERE subscriber_id = %(subscriber_id)s AND redriven_at IS NULL AND reason <> 'mismatch' LIMIT 1

-- fragment: parked_events
JOIN {{dead_letter}} AS letter ON letter.message_id = event.message_id
JOIN {{processed_message}} AS processed
  ON processed.subscriber_id = letter.subscriber_id AND processed.message_id = letter.message_id
WHERE letter.subscriber_id = %(subscriber_id)s AND letter.redriven_at IS NULL AND processed.dead_letter_id IS NOT NULL
