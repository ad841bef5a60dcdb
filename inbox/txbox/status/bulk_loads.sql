-- Runs in the ledger of bulk loads, for people to look at.

-- fragment: is_silent
run.heartbeat_at < now() - make_interval(secs => %(silent_seconds)s::double precision)

-- fragment: state
CASE WHEN run.finished_at IS NOT NULL THEN 'finished' WHEN run.error IS NOT NULL THEN 'failed'
  WHEN {{is_silent}} THEN 'stopped' ELSE 'running' END

-- name: loads
-- Runs, the last begun first.
-- parameters: run_id text (null: of all), subscriber_id text (null: of all), state text (null: of any), silent_seconds
--   double precision, limit bigint
-- returns: run_id, subscriber_id, source, state, writer, chunks, attempts, staging_table, error, started_at,
--   heartbeat_at, finished_at (as moments), rows_read (null: not counted yet), rows_rejected (null: only the chunks know), rejected_sample; and
--   sums of the merged chunks: merged, chunk_rows, chunk_rejected, already_processed, parked, expired, applied
SELECT run.run_id, run.subscriber_id, run.source, {{state}} AS state, run.writer, run.chunks, run.attempts,
  run.staging_table, run.error, {{microseconds(run.started_at)}} AS started_at,
  {{microseconds(run.heartbeat_at)}} AS heartbeat_at, {{microseconds(run.finished_at)}} AS finished_at,
  run.rows_read, run.rows_rejected, coalesce(run.rejected_sample -> 'sample', '[]') AS rejected_sample,
  sums.*
FROM (
  SELECT * FROM {{bulk_load}} AS run
  WHERE (%(run_id)s::text IS NULL OR run.run_id = %(run_id)s)
    AND (%(subscriber_id)s::text IS NULL OR run.subscriber_id = %(subscriber_id)s)
    AND (%(state)s::text IS NULL OR {{state}} = %(state)s)
  ORDER BY run.started_at DESC, run.run_id LIMIT %(limit)s
) AS run
CROSS JOIN LATERAL (
  SELECT count(*) AS merged, coalesce(sum(chunk.rows_read), 0)::bigint AS chunk_rows,
    coalesce(sum(chunk.rows_rejected), 0)::bigint AS chunk_rejected,
    coalesce(sum(chunk.already_processed), 0)::bigint AS already_processed,
    coalesce(sum(chunk.parked), 0)::bigint AS parked, coalesce(sum(chunk.expired), 0)::bigint AS expired,
    coalesce(sum(chunk.applied), 0)::bigint AS applied
  FROM {{bulk_load_chunk}} AS chunk WHERE chunk.run_id = run.run_id
) AS sums
ORDER BY run.started_at DESC, run.run_id

-- name: rejected_sample
-- Rejected rows that the chunks of a run contained.
-- parameters: run_id text, limit bigint
-- returns: event
SELECT sample.event
FROM {{bulk_load_chunk}} AS chunk, jsonb_array_elements_text(chunk.rejected_sample -> 'sample') AS sample (event)
WHERE chunk.run_id = %(run_id)s AND chunk.rejected_sample IS NOT NULL ORDER BY chunk.chunk LIMIT %(limit)s

-- name: run_ids
-- The runs whose ids begin with a text.
-- parameters: start text
-- returns: run_id
SELECT run_id FROM {{bulk_load}} WHERE starts_with(run_id, %(start)s) ORDER BY run_id

-- name: finished_before
-- Runs that were finished before a moment.
-- parameters: moment timestamptz
-- returns: run_id
SELECT run_id FROM {{bulk_load}} WHERE finished_at < %(moment)s ORDER BY finished_at, run_id

-- name: forget
-- Delete a run with its chunks, unless it is being worked on. If someone begins another attempt at that moment, they
-- hold the row's lock: then this waits for it, looks at the row again, and finds its heartbeat.
-- parameters: run_id text, is_forced boolean, silent_seconds double precision
-- returns: run_id; no row if there is none, or if it is being worked on
WITH gone AS (
  DELETE FROM {{bulk_load}} AS run
  WHERE run.run_id = %(run_id)s AND (%(is_forced)s OR run.finished_at IS NOT NULL OR {{is_silent}} OR run.error IS NOT NULL)
  RETURNING run.run_id
), chunks AS (
  DELETE FROM {{bulk_load_chunk}} WHERE run_id IN (SELECT run_id FROM gone)
)
SELECT run_id FROM gone
