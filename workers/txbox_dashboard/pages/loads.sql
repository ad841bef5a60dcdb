-- Bulk loads, and the chunks of one.

-- name: loads
-- The last bulk loads, the newest first.
-- parameters: limit bigint
-- returns: run_id, subscriber_id, source, writer, chunks, attempts, rows_read, rows_rejected, error, started_at,
--   finished_at, idle_seconds (since it was heard of), done, applied, already_processed, parked, expired, chunk_rejected,
--   seconds (from its begin to its last chunk)
SELECT run.run_id, run.subscriber_id, run.source, run.writer, run.chunks, run.attempts, run.rows_read,
  run.rows_rejected, left(run.error, 20000) AS error, {{microseconds(run.started_at)}} AS started_at,
  {{microseconds(run.finished_at)}} AS finished_at, extract(epoch FROM now() - run.heartbeat_at)::float8 AS idle_seconds,
  sums.*
FROM (SELECT * FROM {{bulk_load}} AS every ORDER BY every.started_at DESC LIMIT %(limit)s) AS run
CROSS JOIN LATERAL (
  SELECT count(*) AS done, coalesce(sum(chunk.applied), 0)::bigint AS applied,
    coalesce(sum(chunk.already_processed), 0)::bigint AS already_processed,
    coalesce(sum(chunk.parked), 0)::bigint AS parked, coalesce(sum(chunk.expired), 0)::bigint AS expired,
    coalesce(sum(chunk.rows_rejected), 0)::bigint AS chunk_rejected,
    extract(epoch FROM max(chunk.merged_at) - run.started_at)::float8 AS seconds
  FROM {{bulk_load_chunk}} AS chunk WHERE chunk.run_id = run.run_id
) AS sums
ORDER BY run.started_at DESC

-- name: chunks
-- The chunks of a load that are done.
-- parameters: run_id text, limit bigint
-- returns: chunk, rows_read, rows_rejected, applied, already_processed, merged_at
SELECT chunk, rows_read, rows_rejected, applied, already_processed, {{microseconds(merged_at)}} AS merged_at
FROM {{bulk_load_chunk}} AS done WHERE run_id = %(run_id)s ORDER BY chunk LIMIT %(limit)s
