-- The ledger of bulk loads: which run loads what, and which of its chunks are merged.

-- name: begin_run
-- Begin a run. rows_rejected is null as long as only the chunks know it.
-- parameters: run_id text, subscriber_id text, source text, digest bytea, content bytea, writer text, chunks int,
--   bounds jsonb, rows_read bigint, rows_rejected bigint, rejected_sample jsonb
-- returns: nothing
INSERT INTO {{bulk_load}} (
  run_id, subscriber_id, source, digest, content, writer, chunks, bounds, rows_read, rows_rejected, rejected_sample
)
VALUES (
  %(run_id)s, %(subscriber_id)s, %(source)s, %(digest)s, %(content)s, %(writer)s, %(chunks)s, %(bounds)s::jsonb,
  %(rows_read)s, %(rows_rejected)s, %(rejected_sample)s::jsonb
)

-- name: read_run
-- Return a run as it was begun, with its state.
-- parameters: run_id text
-- returns: the attributes of Run in their order; no row if the run does not exist
SELECT run_id, subscriber_id, source, digest, content, writer, bounds, attempts, staging_table,
  coalesce(rows_read, 0), rows_rejected, rejected_sample, finished_at IS NOT NULL
FROM {{bulk_load}} WHERE run_id = %(run_id)s

-- name: begin_attempt
-- Record another attempt at a run.
-- parameters: run_id text
-- returns: nothing
UPDATE {{bulk_load}} SET attempts = attempts + 1, heartbeat_at = now(), error = NULL WHERE run_id = %(run_id)s

-- name: heartbeat
-- Record that a run is being worked on.
-- parameters: run_id text
-- returns: nothing
UPDATE {{bulk_load}} SET heartbeat_at = now() WHERE run_id = %(run_id)s

-- name: set_staging_table
-- Record that a run's staging table is complete, or lost.
-- parameters: staging_table text (null: lost), run_id text
-- returns: nothing
UPDATE {{bulk_load}} SET staging_table = %(staging_table)s, heartbeat_at = now() WHERE run_id = %(run_id)s

-- name: record_failure
-- Record why an attempt ended, unless the run is finished.
-- parameters: error text, run_id text
-- returns: nothing
UPDATE {{bulk_load}} SET error = %(error)s, heartbeat_at = now() WHERE run_id = %(run_id)s AND finished_at IS NULL

-- name: failure
-- Return why the last attempt ended.
-- parameters: run_id text
-- returns: error; null if it has not failed
SELECT error FROM {{bulk_load}} WHERE run_id = %(run_id)s

-- name: finish_run
-- Record that every chunk of a run is merged.
-- parameters: rows_rejected bigint, rejected_sample jsonb, run_id text
-- returns: nothing
UPDATE {{bulk_load}}
SET finished_at = now(), staging_table = NULL, error = NULL, rows_rejected = %(rows_rejected)s,
  rejected_sample = %(rejected_sample)s::jsonb
WHERE run_id = %(run_id)s

-- name: forget_run
-- Delete a run and its chunks.
-- parameters: run_id text
-- returns: nothing
WITH chunks AS (DELETE FROM {{bulk_load_chunk}} WHERE run_id = %(run_id)s)
DELETE FROM {{bulk_load}} WHERE run_id = %(run_id)s

-- name: run_of_source
-- Return the last run of a source.
-- parameters: subscriber_id text, source text
-- returns: run_id; no row if there is none
SELECT run_id FROM {{bulk_load}} WHERE subscriber_id = %(subscriber_id)s AND source = %(source)s
ORDER BY heartbeat_at DESC LIMIT 1

-- name: forget_abandoned
-- Delete runs that nobody works on any more, and chunks without a run: a task may outlive its driver, and merge a chunk
-- after the run was deleted.
-- parameters: subscriber_id text, own_sources text (a pattern: sources that only the caller loads), other_sources text
--   (a pattern: sources that another process may be loading), abandoned_seconds double precision (for the latter),
--   kept text (a run that will be resumed; null: none)
-- returns: run_id
WITH abandoned AS (
  DELETE FROM {{bulk_load}}
  WHERE subscriber_id = %(subscriber_id)s
    AND run_id IS DISTINCT FROM %(kept)s
    AND (
      source ~ %(own_sources)s
      OR source ~ %(other_sources)s AND heartbeat_at < now() - make_interval(secs => %(abandoned_seconds)s)
    )
  RETURNING run_id
), chunks AS (
  DELETE FROM {{bulk_load_chunk}} AS chunk
  WHERE chunk.run_id IN (SELECT run_id FROM abandoned)
    OR NOT EXISTS (SELECT FROM {{bulk_load}} AS run WHERE run.run_id = chunk.run_id)
)
SELECT run_id FROM abandoned

-- name: merged_chunks
-- Return the chunks of a run that are merged.
-- parameters: run_id text
-- returns: chunk
SELECT chunk FROM {{bulk_load_chunk}} WHERE run_id = %(run_id)s ORDER BY chunk

-- name: totals
-- Return the sums over a run's merged chunks.
-- parameters: run_id text
-- returns: the attributes of Totals in their order
SELECT count(*), coalesce(sum(rows_read), 0)::bigint, coalesce(sum(rows_rejected), 0)::bigint,
  coalesce(sum(already_processed), 0)::bigint, coalesce(sum(applied), 0)::bigint, coalesce(sum(parked), 0)::bigint,
  coalesce(sum(expired), 0)::bigint
FROM {{bulk_load_chunk}} WHERE run_id = %(run_id)s

-- name: remarks
-- Return each chunk's remarks on its rows.
-- parameters: run_id text
-- returns: rejected_sample (of Remarks)
SELECT rejected_sample FROM {{bulk_load_chunk}}
WHERE run_id = %(run_id)s AND rejected_sample IS NOT NULL ORDER BY chunk

-- name: any_processed
-- Return whether the inbox has an id of a subscriber.
-- parameters: subscriber_id text
-- returns: a row, if there is one
SELECT FROM {{processed_message}} WHERE subscriber_id = %(subscriber_id)s LIMIT 1

-- name: any_horizon
-- Return whether the inbox forgets ids of a subscriber.
-- parameters: subscriber_id text
-- returns: a row, if it does
SELECT FROM {{inbox_horizon}} WHERE subscriber_id = %(subscriber_id)s

-- name: some_subscribers
-- Return up to five subscribers with ids in the inbox, with one step in the primary key for each.
-- parameters: none
-- returns: subscriber_id
WITH RECURSIVE found AS (
  (SELECT subscriber_id FROM {{processed_message}} ORDER BY subscriber_id LIMIT 1)
  UNION ALL
  SELECT (
    SELECT processed.subscriber_id FROM {{processed_message}} AS processed
    WHERE processed.subscriber_id > found.subscriber_id ORDER BY processed.subscriber_id LIMIT 1
  )
  FROM found WHERE found.subscriber_id IS NOT NULL
)
SELECT subscriber_id FROM found WHERE subscriber_id IS NOT NULL LIMIT 5
