-- The reports of workers. The status reads them, and the maintainer deletes those of workers that are gone.

-- name: bind_report
-- Limit the time of this transaction's statements, and do not let its commit wait for the disk: another report follows
-- one that is lost. Reports of one worker take turns. Otherwise the next report would not see one whose COMMIT arrives
-- late, over a network that stalls, and would add the same counts again. The lock comes before the statement that reads
-- the row, so that its snapshot is later, too.
-- parameters: worker_id text
-- returns: the settings
SELECT set_config('statement_timeout', '5s', true), set_config('lock_timeout', '5s', true),
  set_config('synchronous_commit', 'off', true), pg_advisory_xact_lock(hashtextextended(%(worker_id)s, 0))

-- fragment: this_minute
to_timestamp(floor(extract(epoch FROM now()) / 60) * 60)

-- fragment: pause
SELECT kind, name, paused_by, note, {{microseconds(paused_at)}} AS paused_at
FROM {{paused}} WHERE kind = 'subscriber' AND name = %(subscriber_id)s

-- name: read_pause
-- Ask whether a subscriber is paused.
-- parameters: subscriber_id text
-- returns: kind, name, paused_by, note, paused_at of the pause; no row if there is none
{{pause}}

-- name: report
-- Report a worker's figures, add what it has done since its last report to this minute's activity, and ask whether its
-- subscriber is paused. The last report is read from the worker's row, so a report whose answer was lost is not added
-- twice. Several workers of a subscriber add to the same rows, all in the order of the key.
-- parameters: worker_id text, subscriber_id text, source text, source_retention_seconds double precision, host text,
--   pid int, version text, state text, outcomes text (JSON), per_second text (JSON), deadlocks bigint, retries bigint,
--   last_batch_seconds_ago double precision, oldest_sent_at timestamptz, counted_before text (JSON: counts that are not
--   added if there is no earlier report)
-- returns: as read_pause
WITH before AS (
  SELECT coalesce(
    (SELECT outcomes || jsonb_build_object('deadlocks', deadlocks, 'retries', retries)
     FROM {{worker_report}} WHERE worker_id = %(worker_id)s),
    %(counted_before)s::jsonb
  ) AS counts
), difference AS (
  SELECT figure, value::bigint - coalesce((before.counts ->> figure)::bigint, 0) AS count
  FROM before, jsonb_each_text(
    %(outcomes)s::jsonb || jsonb_build_object('deadlocks', %(deadlocks)s::bigint, 'retries', %(retries)s::bigint)
  ) AS now_counted (figure, value)
), added AS (
  INSERT INTO {{reported_activity}} AS act (kind, name, minute, figure, count)
  SELECT 'subscriber', %(subscriber_id)s, {{this_minute}}, figure, count
  FROM difference WHERE count > 0 ORDER BY figure COLLATE "C"
  ON CONFLICT (kind, name, minute, figure) DO UPDATE SET count = act.count + excluded.count
), reported AS (
  INSERT INTO {{worker_report}} (
    worker_id, subscriber_id, source, source_retention_seconds, host, pid, version, state, outcomes, per_second,
    deadlocks, retries, last_batch_at, oldest_sent_at
  )
  VALUES (
    %(worker_id)s, %(subscriber_id)s, %(source)s, %(source_retention_seconds)s, %(host)s, %(pid)s, %(version)s,
    %(state)s, %(outcomes)s::jsonb, %(per_second)s::jsonb, %(deadlocks)s, %(retries)s,
    now() - make_interval(secs => %(last_batch_seconds_ago)s::float8), %(oldest_sent_at)s::timestamptz
  )
  ON CONFLICT (worker_id) DO UPDATE
  SET state = excluded.state, outcomes = excluded.outcomes, per_second = excluded.per_second,
    deadlocks = excluded.deadlocks, retries = excluded.retries, last_batch_at = excluded.last_batch_at,
    oldest_sent_at = excluded.oldest_sent_at, seen_at = now()
)
{{pause}}

-- name: delete_report
-- Delete the report of a worker that ends, the reports of workers that were killed more than a day ago, and activity of
-- its subscriber that was kept long enough.
-- parameters: worker_id text, subscriber_id text, kept interval
-- returns: nothing
WITH old AS (
  DELETE FROM {{reported_activity}}
  WHERE kind = 'subscriber' AND name = %(subscriber_id)s AND minute < now() - %(kept)s::interval
)
DELETE FROM {{worker_report}} WHERE worker_id = %(worker_id)s OR seen_at < now() - interval '1 day'
