-- The reports of workers; the status reads them, and the maintainer deletes those of workers that are gone.

-- name: bind_report
-- Bound the time of this transaction's statements, and have its commit not wait for the disk: a report that is lost is
-- followed by another one.
-- parameters: none
-- returns: the settings
SELECT set_config('statement_timeout', '5s', true), set_config('synchronous_commit', 'off', true)

-- fragment: pause
SELECT kind, name, paused_by, note, {{microseconds(paused_at)}} AS paused_at
FROM {{paused}} WHERE kind = 'subscriber' AND name = %(subscriber_id)s

-- name: read_pause
-- Ask whether a subscriber is paused.
-- parameters: subscriber_id text
-- returns: kind, name, paused_by, note, paused_at of the pause; no row if there is none
{{pause}}

-- name: report
-- Report how a worker stands, and ask whether its subscriber is paused.
-- parameters: worker_id text, subscriber_id text, source text, source_retention_seconds double precision, host text,
--   pid int, version text, state text, outcomes text (JSON), per_second text (JSON), deadlocks bigint, retries bigint,
--   last_batch_seconds_ago double precision
-- returns: as read_pause
WITH reported AS (
  INSERT INTO {{worker_report}} (
    worker_id, subscriber_id, source, source_retention_seconds, host, pid, version, state, outcomes, per_second,
    deadlocks, retries, last_batch_at
  )
  VALUES (
    %(worker_id)s, %(subscriber_id)s, %(source)s, %(source_retention_seconds)s, %(host)s, %(pid)s, %(version)s,
    %(state)s, %(outcomes)s::jsonb, %(per_second)s::jsonb, %(deadlocks)s, %(retries)s,
    now() - make_interval(secs => %(last_batch_seconds_ago)s::float8)
  )
  ON CONFLICT (worker_id) DO UPDATE
  SET state = excluded.state, outcomes = excluded.outcomes, per_second = excluded.per_second,
    deadlocks = excluded.deadlocks, retries = excluded.retries, last_batch_at = excluded.last_batch_at, seen_at = now()
)
{{pause}}

-- name: delete_report
-- Delete the report of a worker that ends, and reports of workers that were killed more than a day ago.
-- parameters: worker_id text
-- returns: nothing
DELETE FROM {{worker_report}} WHERE worker_id = %(worker_id)s OR seen_at < now() - interval '1 day'
