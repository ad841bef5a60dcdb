-- Which maintainer may work, what it has done, and the horizons.

-- name: acquire
-- Take the right to work if no other maintainer has it. Its row is locked while its owner has a transaction open, so
-- this waits for that, but not for long. An expiry further away than any lease comes from a clock that was set back.
-- parameters: owner text, lease_seconds double precision
-- returns: a row, if it is ours
INSERT INTO {{maintenance}} AS lease (task, owner, expires_at, started_at)
VALUES ('lease', %(owner)s, clock_timestamp() + make_interval(secs => %(lease_seconds)s), clock_timestamp())
ON CONFLICT (task) DO UPDATE SET
  owner = excluded.owner,
  expires_at = clock_timestamp() + make_interval(secs => %(lease_seconds)s),
  started_at = CASE WHEN lease.owner = excluded.owner THEN lease.started_at ELSE clock_timestamp() END
WHERE lease.owner = excluded.owner OR lease.expires_at IS NULL
  OR lease.expires_at NOT BETWEEN clock_timestamp() AND clock_timestamp() + make_interval(secs => %(lease_seconds)s)
RETURNING task

-- name: renew
-- Limit this transaction, and renew the right to work. The row stays locked until the transaction ends, so that no
-- other maintainer begins meanwhile. A maintainer that was frozen finds that it has lost the right, or that its
-- transaction was ended.
-- parameters: lock_timeout text, statement_timeout text, idle_timeout text, owner text, lease_seconds double precision
-- returns: a row, if it is still ours
WITH bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', %(lock_timeout)s, true),
    set_config('statement_timeout', %(statement_timeout)s, true),
    set_config('idle_in_transaction_session_timeout', %(idle_timeout)s, true)
)
UPDATE {{maintenance}} AS lease SET expires_at = clock_timestamp() + make_interval(secs => %(lease_seconds)s)
FROM bound
WHERE lease.task = 'lease' AND lease.owner = %(owner)s AND lease.expires_at > clock_timestamp()
RETURNING lease.task

-- name: release
-- Give the right to work back.
-- parameters: owner text
-- returns: nothing
UPDATE {{maintenance}} SET expires_at = NULL WHERE task = 'lease' AND owner = %(owner)s

-- name: read_task
-- The state of a task.
-- parameters: task text
-- returns: detail, the seconds since it finished; no row if it was never begun
SELECT detail, extract(epoch FROM now() - finished_at)::double precision AS seconds FROM {{maintenance}}
WHERE task = %(task)s

-- name: progress
-- Record what a task has done, in the transaction that did it.
-- parameters: task text, owner text, removed bigint, detail jsonb
-- returns: nothing
INSERT INTO {{maintenance}} AS done (task, owner, started_at, removed, detail)
VALUES (%(task)s, %(owner)s, now(), %(removed)s, %(detail)s::jsonb)
ON CONFLICT (task) DO UPDATE SET
  owner = excluded.owner, removed = done.removed + excluded.removed, detail = excluded.detail

-- name: finish_task
-- Record that a task has run to its end, or for as long as it may at once.
-- parameters: task text, owner text, seconds double precision (how long it took), detail jsonb
-- returns: nothing
INSERT INTO {{maintenance}} AS done (task, owner, started_at, finished_at, detail)
VALUES (%(task)s, %(owner)s, now() - make_interval(secs => %(seconds)s), now(), %(detail)s::jsonb)
ON CONFLICT (task) DO UPDATE SET owner = excluded.owner, started_at = excluded.started_at,
  finished_at = excluded.finished_at, detail = (done.detail || excluded.detail) - 'error'

-- name: fail_task
-- Record why a task was not done, until it runs to its end again.
-- parameters: task text, owner text, error text
-- returns: nothing
INSERT INTO {{maintenance}} AS failed (task, owner, detail)
VALUES (%(task)s, %(owner)s, jsonb_build_object('error', %(error)s::text))
ON CONFLICT (task) DO UPDATE SET owner = excluded.owner, detail = failed.detail || excluded.detail

-- name: server_state
-- Whether this server is read-only, how its inbox is stored, and its clock.
-- parameters: none
-- returns: read_only boolean, partitioned boolean, seconds (since 1970)
SELECT current_setting('transaction_read_only')::boolean AS read_only, relkind = 'p' AS partitioned,
  extract(epoch FROM clock_timestamp())::double precision AS seconds
FROM pg_class WHERE oid = '{{literal(processed_message)}}'::regclass

-- name: inbox_subscribers
-- Every subscriber of the inbox, by one index lookup each.
-- parameters: none
-- returns: subscriber_id
WITH RECURSIVE found (subscriber_id) AS (
  (SELECT subscriber_id FROM {{processed_message}} ORDER BY subscriber_id LIMIT 1)
  UNION ALL
  SELECT (
    SELECT later.subscriber_id FROM {{processed_message}} AS later WHERE later.subscriber_id > found.subscriber_id
    ORDER BY later.subscriber_id LIMIT 1
  ) FROM found WHERE found.subscriber_id IS NOT NULL
)
SELECT subscriber_id FROM found WHERE subscriber_id IS NOT NULL

-- name: lease_subscribers
-- Every subscriber that has leases, by one index lookup each.
-- parameters: none
-- returns: subscriber_id
WITH RECURSIVE found (subscriber_id) AS (
  (SELECT subscriber_id FROM {{message_lease}} ORDER BY subscriber_id LIMIT 1)
  UNION ALL
  SELECT (
    SELECT later.subscriber_id FROM {{message_lease}} AS later WHERE later.subscriber_id > found.subscriber_id
    ORDER BY later.subscriber_id LIMIT 1
  ) FROM found WHERE found.subscriber_id IS NOT NULL
)
SELECT subscriber_id FROM found WHERE subscriber_id IS NOT NULL

-- name: source_retentions
-- How long the sources of subscribers keep messages, as their workers reported it.
-- parameters: none
-- returns: subscriber_id, seconds
SELECT subscriber_id, max(source_retention_seconds) AS seconds FROM {{worker_report}}
WHERE source_retention_seconds IS NOT NULL GROUP BY subscriber_id

-- name: move_horizons
-- Move horizons forward, never back. Each moves by at least a thousandth of its window, and at most by ten minutes:
-- every recording reads the row, so it must not have many versions. None moves beyond what every archive has.
-- parameters: subscriber_ids text[], windows double precision[] (in seconds)
-- returns: nothing
INSERT INTO {{inbox_horizon}} AS moved (subscriber_id, horizon)
SELECT given.subscriber_id, least(now() - make_interval(secs => given.seconds), archived.upto)
FROM unnest(%(subscriber_ids)s::text[], %(windows)s::double precision[]) AS given (subscriber_id, seconds)
CROSS JOIN (SELECT min(coalesce(lake.archived_upto, '-infinity')) AS upto FROM {{archive}} AS lake) AS archived
WHERE isfinite(archived.upto) IS NOT FALSE
ORDER BY given.subscriber_id
ON CONFLICT (subscriber_id) DO UPDATE SET horizon = excluded.horizon, moved_at = now()
WHERE excluded.horizon - moved.horizon >= least((now() - excluded.horizon) / 1000, interval '10 minutes')

-- name: horizons
-- The horizons, as committed.
-- parameters: none
-- returns: subscriber_id, seconds (since 1970)
SELECT subscriber_id, extract(epoch FROM horizon)::double precision AS seconds FROM {{inbox_horizon}}

-- name: still_running
-- Which of some transactions are still running, and in which sessions; without those that hold the claims of workers over
-- the outbox for as long as these run, and record nothing.
-- parameters: virtualxids text[]
-- returns: virtualxid, pid
SELECT virtualxid, pid FROM pg_locks
WHERE locktype = 'virtualxid' AND mode = 'ExclusiveLock' AND virtualxid = ANY(%(virtualxids)s::text[])
  AND pid NOT IN (SELECT pid FROM pg_stat_activity WHERE application_name = 'txbox-lane-claims')
ORDER BY virtualxid

-- name: generation_seconds
-- How long ago the current generation of a rotating inbox was opened.
-- parameters: none
-- returns: seconds
SELECT coalesce(extract(epoch FROM clock_timestamp() - max(opened_at)), 0)::double precision FROM {{inbox_generation}}
