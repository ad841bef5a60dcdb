-- Deletes in physical order: each statement looks at a stretch of blocks of one table (a Tid Range Scan, from
-- PostgreSQL 14 on). So it needs no index on a time, and its cost depends only on the stretch.
--
-- Rows are locked before they are deleted, and rows locked by another transaction are skipped. So nothing that holds
-- locks waits for a redrive, a parking or a worker.

-- fragment: stretch
ctid >= %(first)s::text::tid AND ctid < %(beyond)s::text::tid

-- fragment: ago
now() - make_interval(secs => %(window)s::double precision)

-- What a statement reports of its stretch; before it comes ``young``: the rows younger than the cursor's window.
-- fragment: found
SELECT (SELECT count(*) FROM removed) AS removed, (SELECT (max(tid)::text::point)[0]::bigint FROM locked) AS last_block,
  young.rows AS fresh, (young.first::text::point)[0]::bigint AS first_fresh,
  (SELECT count(*) FROM locked WHERE tid > young.first) AS removed_behind
FROM young

-- The time up to which every archive has everything; null if there is none.
-- fragment: archived
(SELECT min(coalesce(lake.archived_upto, '-infinity')) FROM {{archive}} AS lake)

-- Never beyond the horizon that every running transaction can see, less an hour for clocks that differ: the message of
-- a deleted row was sent before the horizon and is not run again. Nor beyond what every archive has.
-- fragment: cuts
cuts AS MATERIALIZED (
  SELECT horizon.subscriber_id, given.seconds,
    least(
      horizon.horizon, to_timestamp(given.settled), now() - make_interval(secs => given.seconds),
      {{archived}}
    ) - %(slack)s::interval AS before
  FROM unnest(%(subscriber_ids)s::text[], %(windows)s::double precision[], %(settled)s::double precision[])
    AS given (subscriber_id, seconds, settled)
  JOIN {{inbox_horizon}} AS horizon ON horizon.subscriber_id = given.subscriber_id
)

-- Rows younger than a cursor's window, where it stays. The time is that from which nothing goes now. It may be long
-- before the window's: a horizon moves in steps, and one that running transactions may not see does not count. A cursor
-- that went by the window alone would pass rows that may go soon.
-- fragment: fresh_since
(SELECT coalesce(min(before), '-infinity') FROM cuts
  WHERE seconds <= %(window)s::double precision AND isfinite(before))

-- fragment: not_waiting
(seen.dead_letter_id IS NULL OR (
    SELECT letter.redriven_at IS NULL AND coalesce(letter.discarded_at >= cuts.before, true)
    FROM {{dead_letter}} AS letter
    WHERE letter.dead_letter_id = seen.dead_letter_id
  ) IS NOT TRUE)

-- name: forget_ids
-- Delete ids that were kept long enough. The row of a letter that waits stays, and so does that of one discarded since.
-- If the inbox has begun to rotate meanwhile, delete nothing: a place would be one in each of its generations.
-- parameters: first text (a place), beyond text (a place), subscriber_ids text[], windows double precision[] (in seconds),
--   settled double precision[] (horizons, in seconds since 1970), window double precision (the cursor's, in seconds), slack
--   interval, rows bigint (at most)
-- returns: removed, last_block (of those), fresh (rows that are younger than the cursor's window),
--   first_fresh (the first block of those), removed_behind (removed rows behind the first of those)
WITH {{cuts}}, seen AS MATERIALIZED (
  SELECT ctid AS tid, subscriber_id, processed_at, dead_letter_id FROM {{processed_message}}
  WHERE {{stretch}} AND tableoid = '{{literal(processed_message)}}'::regclass
), old AS MATERIALIZED (
  SELECT seen.tid FROM seen JOIN cuts ON cuts.subscriber_id = seen.subscriber_id
  WHERE seen.processed_at < cuts.before AND {{not_waiting}}
  ORDER BY seen.tid LIMIT %(rows)s
), locked AS MATERIALIZED (
  SELECT ctid AS tid FROM {{processed_message}} WHERE ctid = ANY(ARRAY(SELECT tid FROM old)) FOR UPDATE SKIP LOCKED
), removed AS (
  DELETE FROM {{processed_message}} WHERE ctid = ANY(ARRAY(SELECT tid FROM locked)) RETURNING 1
), young AS (
  SELECT count(*) AS rows, min(tid) AS first FROM seen WHERE processed_at >= {{fresh_since}}
)
{{found}}

-- name: count_ids
-- Count what forget_ids would delete, once the horizons have moved.
-- parameters: first text (a place), beyond text (a place), subscriber_ids text[], windows double precision[] (in seconds),
--   slack interval
-- returns: rows
WITH seen AS MATERIALIZED (
  SELECT subscriber_id, processed_at, dead_letter_id FROM {{processed_message}} WHERE {{stretch}}
), cuts AS (
  SELECT subscriber_id, least(now() - make_interval(secs => seconds), {{archived}}) - %(slack)s::interval AS before
  FROM unnest(%(subscriber_ids)s::text[], %(windows)s::double precision[]) AS given (subscriber_id, seconds)
)
SELECT count(*) FROM seen JOIN cuts ON cuts.subscriber_id = seen.subscriber_id
WHERE seen.processed_at < cuts.before AND {{not_waiting}}

-- An open letter of a completed message was sent by a redrive that died before its commit. The lease says that there is
-- nothing to redrive, so it stays as long as the letter waits for a person to see it.
-- fragment: no_letter
(SELECT true FROM {{dead_letter}} AS letter
    WHERE letter.subscriber_id = seen.subscriber_id AND letter.message_id = seen.message_id
      AND letter.redriven_at IS NULL AND letter.discarded_at IS NULL LIMIT 1) IS NOT TRUE

-- name: forget_leases
-- Delete completed leases that were kept long enough. A completed lease stays completed in every newer version.
-- parameters: first text (a place), beyond text (a place), subscriber_ids text[], windows double precision[] (in seconds),
--   settled double precision[] (horizons, in seconds since 1970), window double precision (the cursor's, in seconds), slack
--   interval, rows bigint (at most)
-- returns: removed, last_block (of those), fresh (completed leases that are younger than the cursor's window),
--   first_fresh (the first block of those), removed_behind (removed rows behind the first of those)
WITH {{cuts}}, seen AS MATERIALIZED (
  SELECT ctid AS tid, subscriber_id, message_id, completed_at FROM {{message_lease}} WHERE {{stretch}}
), old AS MATERIALIZED (
  SELECT seen.tid FROM seen JOIN cuts ON cuts.subscriber_id = seen.subscriber_id
  WHERE seen.completed_at < cuts.before AND {{no_letter}}
  ORDER BY seen.tid LIMIT %(rows)s
), locked AS MATERIALIZED (
  SELECT ctid AS tid FROM {{message_lease}}
  WHERE ctid = ANY(ARRAY(SELECT tid FROM old)) AND completed_at IS NOT NULL FOR UPDATE SKIP LOCKED
), removed AS (
  DELETE FROM {{message_lease}}
  WHERE ctid = ANY(ARRAY(SELECT tid FROM locked)) AND completed_at IS NOT NULL RETURNING 1
), young AS (
  SELECT count(*) AS rows, min(tid) AS first FROM seen WHERE completed_at >= {{fresh_since}}
)
{{found}}

-- name: count_leases
-- Count what forget_leases would delete, once the horizons have moved.
-- parameters: first text (a place), beyond text (a place), subscriber_ids text[], windows double precision[] (in seconds),
--   slack interval
-- returns: rows
WITH seen AS MATERIALIZED (
  SELECT subscriber_id, message_id, completed_at FROM {{message_lease}} WHERE {{stretch}}
)
SELECT count(*) FROM seen JOIN unnest(%(subscriber_ids)s::text[], %(windows)s::double precision[]) AS given (subscriber_id, seconds)
  ON given.subscriber_id = seen.subscriber_id
WHERE seen.completed_at < least(now() - make_interval(secs => given.seconds), {{archived}}) - %(slack)s::interval
  AND {{no_letter}}

-- name: forget_results
-- Delete the results of leases that were completed long enough ago; the leases stay.
-- parameters: first text (a place), beyond text (a place), window double precision (in seconds), rows bigint (at most)
-- returns: removed, last_block (of those), fresh (results that are younger than the window),
--   first_fresh (the first block of those), removed_behind (removed rows behind the first of those)
WITH seen AS MATERIALIZED (
  SELECT ctid AS tid, completed_at < {{ago}} AS old FROM {{message_lease}}
  WHERE {{stretch}} AND result IS NOT NULL AND completed_at IS NOT NULL
), locked AS MATERIALIZED (
  SELECT ctid AS tid FROM {{message_lease}}
  WHERE ctid = ANY(ARRAY(SELECT tid FROM seen WHERE old ORDER BY tid LIMIT %(rows)s)) AND completed_at IS NOT NULL
  FOR UPDATE SKIP LOCKED
), removed AS (
  UPDATE {{message_lease}} SET result = NULL
  WHERE ctid = ANY(ARRAY(SELECT tid FROM locked)) AND completed_at IS NOT NULL RETURNING 1
), young AS (
  SELECT count(*) AS rows, min(tid) AS first FROM seen WHERE NOT old
)
{{found}}

-- name: count_results
-- Count what forget_results would delete.
-- parameters: first text (a place), beyond text (a place), window double precision (in seconds)
-- returns: rows
SELECT count(*) FROM {{message_lease}} WHERE {{stretch}} AND result IS NOT NULL AND completed_at < {{ago}}

-- fragment: response_is_old
seen.kept_at < now() - make_interval(secs => least(given.seconds, %(every)s::double precision))

-- name: forget_responses
-- Delete responses that were kept long enough. No horizon matters: without its response, a request is still a
-- duplicate.
-- parameters: first text (a place), beyond text (a place), subscriber_ids text[], windows double precision[] (in seconds),
--   every double precision (of all subscribers, in seconds; or null), window double precision (the cursor's, in seconds),
--   rows bigint (at most)
-- returns: removed, last_block (of those), fresh (responses that are younger than the cursor's window),
--   first_fresh (the first block of those), removed_behind (removed rows behind the first of those)
WITH seen AS MATERIALIZED (
  SELECT ctid AS tid, subscriber_id, kept_at FROM {{kept_response}} WHERE {{stretch}}
), old AS MATERIALIZED (
  SELECT seen.tid FROM seen
  LEFT JOIN unnest(%(subscriber_ids)s::text[], %(windows)s::double precision[]) AS given (subscriber_id, seconds)
    ON given.subscriber_id = seen.subscriber_id
  WHERE {{response_is_old}} ORDER BY seen.tid LIMIT %(rows)s
), locked AS MATERIALIZED (
  SELECT ctid AS tid FROM {{kept_response}} WHERE ctid = ANY(ARRAY(SELECT tid FROM old)) FOR UPDATE SKIP LOCKED
), removed AS (
  DELETE FROM {{kept_response}} WHERE ctid = ANY(ARRAY(SELECT tid FROM locked)) RETURNING 1
), young AS (
  SELECT count(*) AS rows, min(tid) AS first FROM seen WHERE kept_at >= {{ago}}
)
{{found}}

-- name: count_responses
-- Count what forget_responses would delete.
-- parameters: first text (a place), beyond text (a place), subscriber_ids text[], windows double precision[] (in seconds),
--   every double precision (in seconds, or null)
-- returns: rows
WITH seen AS MATERIALIZED (
  SELECT subscriber_id, kept_at FROM {{kept_response}} WHERE {{stretch}}
)
SELECT count(*) FROM seen
LEFT JOIN unnest(%(subscriber_ids)s::text[], %(windows)s::double precision[]) AS given (subscriber_id, seconds)
  ON given.subscriber_id = seen.subscriber_id
WHERE {{response_is_old}}

-- Tasks that go through whole tables, which are small: per table, two statements are built.

-- name: forget
-- Delete what one of the statements below finds; its text and its table are filled in by txbox.maintenance.tasks.
-- parameters: rows bigint (at most)
-- returns: nothing; the count of rows
DELETE FROM {table} WHERE ctid = ANY(ARRAY({old} ORDER BY ctid LIMIT %(rows)s FOR UPDATE SKIP LOCKED))

-- name: forget_letters
-- The same for letters. The inbox row of a discarded letter keeps refusing its copies, under the number 0, which no
-- letter has; by it, an audit tells the row from one whose letter is lost.
-- parameters: rows bigint (at most)
-- returns: nothing; the count of rows
WITH old AS MATERIALIZED ({old} ORDER BY ctid LIMIT %(rows)s FOR UPDATE SKIP LOCKED), given_up AS (
  UPDATE {{processed_message}} AS recorded SET dead_letter_id = 0
  FROM {{dead_letter}} AS letter
  WHERE letter.ctid = ANY(ARRAY(SELECT ctid FROM old)) AND recorded.subscriber_id = letter.subscriber_id
    AND recorded.message_id = letter.message_id AND recorded.dead_letter_id = letter.dead_letter_id
)
DELETE FROM {{dead_letter}} WHERE ctid = ANY(ARRAY(SELECT ctid FROM old))

-- name: count
-- Count what one of the statements below finds.
-- parameters: none
-- returns: rows
SELECT count(*) FROM ({old}) AS old

-- name: old_failures
-- Failures of messages that are processed or parked, by one lookup in the inbox each, whatever is known of its size.
-- parameters: first text (a place), beyond text (a place), window double precision (in seconds)
-- returns: ctid
SELECT ctid FROM {{message_failure}} AS failure WHERE {{stretch}} AND last_failed_at < {{ago}} AND (
  SELECT true FROM {{processed_message}} AS processed
  WHERE processed.subscriber_id = failure.subscriber_id AND processed.message_id = failure.message_id LIMIT 1
)

-- name: old_letters
-- Letters that were redriven or discarded. A letter stays if its message is at work under a lease, because its attempts
-- are counted from the letter. It stays if it was redriven since the horizon, because it allows an old message to run.
-- And it stays if it holds its key, because its copy was not processed: see order.sql.
-- parameters: first text (a place), beyond text (a place), window double precision (in seconds)
-- returns: ctid
SELECT ctid FROM {{dead_letter}} AS letter WHERE {{stretch}} AND coalesce(redriven_at, discarded_at) < {{ago}} AND (
  SELECT true FROM {{message_lease}} AS lease
  WHERE lease.subscriber_id = letter.subscriber_id AND lease.message_id = letter.message_id
    AND lease.completed_at IS NULL LIMIT 1
) IS NOT TRUE AND (
  SELECT horizon.horizon <= letter.redriven_at FROM {{inbox_horizon}} AS horizon
  WHERE horizon.subscriber_id = letter.subscriber_id
) IS NOT TRUE AND (letter.order_position IS NULL OR letter.discarded_at IS NOT NULL OR EXISTS (
  SELECT FROM {{inbox_horizon}} AS horizon
  WHERE horizon.subscriber_id = letter.subscriber_id AND horizon.horizon > letter.redriven_at
))

-- name: old_operations
-- Redrives and discards by filter that have finished.
-- parameters: first text (a place), beyond text (a place), window double precision (in seconds)
-- returns: ctid
SELECT ctid FROM {{dead_letter_operation}} WHERE {{stretch}} AND finished_at < {{ago}}

-- name: old_selections
-- Letters selected by an operation that is gone. Both are stored in one transaction.
-- parameters: first text (a place), beyond text (a place)
-- returns: ctid
SELECT ctid FROM {{dead_letter_selection}} AS selection WHERE {{stretch}} AND (
  SELECT true FROM {{dead_letter_operation}} AS operation WHERE operation.operation_id = selection.operation_id LIMIT 1
) IS NOT TRUE

-- name: old_loads
-- The ledger's rows of finished bulk loads; those of their chunks are then without a run.
-- parameters: first text (a place), beyond text (a place), window double precision (in seconds)
-- returns: ctid
SELECT ctid FROM {{bulk_load}} WHERE {{stretch}} AND finished_at < {{ago}}

-- name: old_chunks
-- Rows of chunks whose run is gone.
-- parameters: first text (a place), beyond text (a place), window double precision (in seconds)
-- returns: ctid
SELECT ctid FROM {{bulk_load_chunk}} AS chunk WHERE {{stretch}} AND merged_at < {{ago}}
  AND (SELECT true FROM {{bulk_load}} AS run WHERE run.run_id = chunk.run_id LIMIT 1) IS NOT TRUE

-- name: old_relays
-- Rows of relays that have not reported for a long time.
-- parameters: first text (a place), beyond text (a place), window double precision (in seconds)
-- returns: ctid
SELECT ctid FROM {{outbox_relay}} WHERE {{stretch}} AND seen_at < {{ago}}

-- name: old_workers
-- Rows of workers that have not reported for a long time.
-- parameters: first text (a place), beyond text (a place), window double precision (in seconds)
-- returns: ctid
SELECT ctid FROM {{worker_report}} WHERE {{stretch}} AND seen_at < {{ago}}

-- name: old_activity
-- What workers and relays did long ago.
-- parameters: first text (a place), beyond text (a place), window double precision (in seconds)
-- returns: ctid
SELECT ctid FROM {{reported_activity}} WHERE {{stretch}} AND minute < {{ago}}

-- name: old_actions
-- What people did long ago.
-- parameters: first text (a place), beyond text (a place), window double precision (in seconds)
-- returns: ctid
SELECT ctid FROM {{operator_action}} WHERE {{stretch}} AND acted_at < {{ago}}

-- name: blocks
-- How many blocks a table has.
-- parameters: name text (quoted)
-- returns: blocks
SELECT pg_relation_size(%(name)s::text::regclass) / current_setting('block_size')::bigint
