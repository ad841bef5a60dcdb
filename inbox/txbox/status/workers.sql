-- The workers that have not signed off, by their own reports.

-- name: workers
-- Each worker, by its subscriber. A stale one has not reported for that long: it does not run, or cannot reach the
-- database.
-- parameters: stale_after interval
-- returns: the columns of WorkerStatus
SELECT worker_id, subscriber_id, source, source_retention_seconds, host, pid, version, state, outcomes, per_second,
  deadlocks, retries, {{microseconds(started_at)}} AS started_at, {{microseconds(last_batch_at)}} AS last_batch_at,
  {{microseconds(oldest_sent_at)}} AS oldest_sent_at,
  greatest(extract(epoch FROM now() - seen_at), 0)::float8 AS seen_seconds_ago,
  seen_at < now() - %(stale_after)s::interval AS stale
FROM {{worker_report}} ORDER BY subscriber_id, host, pid, worker_id
