-- The runs of a data source in the ledger of bulk loads, in addition to ledger.sql. How many pieces a run has is known
-- only when it ends. Tasks that Spark ran twice leave pieces of which only the applied events count.

-- name: begin_run
-- Begin a run, if this is its first task; otherwise record that it is being worked on, and its pieces so far.
-- parameters: run_id text, subscriber_id text, source text, digest bytea
-- returns: nothing
INSERT INTO {{bulk_load}} AS run (run_id, subscriber_id, source, digest, writer, chunks, bounds)
VALUES (%(run_id)s, %(subscriber_id)s, %(source)s, %(digest)s, 'copy', 1, '[]')
ON CONFLICT (run_id) DO UPDATE SET heartbeat_at = now(), chunks = (
  SELECT greatest(count(*), 1) FROM {{bulk_load_chunk}} AS piece WHERE piece.run_id = run.run_id
)

-- name: ended
-- Return whether and why a run has ended. It is a separate statement after the run's lock, so that it sees what has
-- committed.
-- parameters: run_id text
-- returns: error, finished
SELECT error, finished_at IS NOT NULL AS finished FROM {{bulk_load}} WHERE run_id = %(run_id)s

-- name: abort_run
-- Record why a run failed, unless a task has recorded it.
-- parameters: run_id text, error text
-- returns: nothing
UPDATE {{bulk_load}} SET error = coalesce(error, %(error)s), heartbeat_at = now()
WHERE run_id = %(run_id)s AND finished_at IS NULL

-- name: abort_batch
-- Record why the open batches of a query failed, unless a task has recorded it.
-- parameters: subscriber_id text, digest bytea (of the query), error text
-- returns: nothing
UPDATE {{bulk_load}} SET error = coalesce(error, %(error)s), heartbeat_at = now()
WHERE subscriber_id = %(subscriber_id)s AND digest = %(digest)s AND finished_at IS NULL

-- name: lock_run
-- Wait for the run's transactions, which share the lock: of a task that runs twice, one attempt may outlive the other.
-- parameters: stalled text (longest wait), run_lock bigint
-- returns: a setting, nothing
SELECT set_config('lock_timeout', %(stalled)s, true), pg_advisory_xact_lock(%(run_lock)s)

-- name: drop_lost_pieces
-- Delete the pieces of attempts that Spark does not count.
-- parameters: run_id text, pieces int[] (those that count)
-- returns: how many events the deleted pieces have applied
WITH lost AS (
  DELETE FROM {{bulk_load_chunk}} WHERE run_id = %(run_id)s AND chunk <> ALL(%(pieces)s) RETURNING applied
)
SELECT coalesce(sum(applied), 0)::bigint FROM lost

-- name: settle_pieces
-- Number the pieces of a run from 0, and add to them what deleted pieces have applied: for the remaining pieces, these
-- events were already processed. The numbers that tasks choose are higher than any number of pieces.
-- parameters: run_id text, lost bigint (events)
-- returns: nothing
UPDATE {{bulk_load_chunk}} AS piece
SET chunk = ranked.number, applied = piece.applied + ranked.taken,
  already_processed = piece.already_processed - ranked.taken
FROM (
  SELECT chunk, row_number() OVER (ORDER BY merged_at, chunk) - 1 AS number,
    greatest(0, least(already_processed - parked, %(lost)s::bigint - coalesce(
      sum(already_processed - parked) OVER (
        ORDER BY merged_at, chunk ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
      ), 0
    )))::bigint AS taken
  FROM {{bulk_load_chunk}} WHERE run_id = %(run_id)s
) AS ranked
WHERE piece.run_id = %(run_id)s AND piece.chunk = ranked.chunk

-- name: finish_run
-- Record that every piece of a run is merged, with the sums of the pieces.
-- parameters: run_id text, rejected_sample jsonb (of Remarks)
-- returns: nothing
UPDATE {{bulk_load}} AS run
SET finished_at = now(), heartbeat_at = now(), error = NULL, chunks = greatest(sums.pieces, 1),
  rows_read = sums.rows_read, rows_rejected = sums.rows_rejected, rejected_sample = %(rejected_sample)s::jsonb
FROM (
  SELECT count(*) AS pieces, coalesce(sum(rows_read), 0) AS rows_read, coalesce(sum(rows_rejected), 0) AS rows_rejected
  FROM {{bulk_load_chunk}} WHERE run_id = %(run_id)s
) AS sums
WHERE run.run_id = %(run_id)s

-- name: forget_batches
-- Delete all batches of a subscriber's streams but the last one, if they are finished, belong to the same query, or were
-- abandoned long ago.
-- parameters: run_id text (the last), subscriber_id text, source text, digest bytea (of the query; null: not known),
--   abandoned_seconds double precision
-- returns: nothing
WITH forgotten AS (
  DELETE FROM {{bulk_load}}
  WHERE subscriber_id = %(subscriber_id)s AND source = %(source)s AND run_id <> %(run_id)s
    AND (finished_at IS NOT NULL OR digest = %(digest)s OR heartbeat_at < now() - make_interval(secs => %(abandoned_seconds)s))
  RETURNING run_id
)
DELETE FROM {{bulk_load_chunk}} AS chunk USING forgotten WHERE chunk.run_id = forgotten.run_id
