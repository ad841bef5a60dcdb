-- Bulk loads that wait for a lock.

-- name: blocked_loads
-- Which bulk loads wait for which sessions.
-- parameters: tag int (the upper bits of the runs' advisory locks), run_id text (or null for all)
-- returns: run_id, pid, seconds, blocker_pid, blocker_run_id, blocker_owner, blocker_state, blocker_seconds
WITH of_run AS (
  SELECT pid, lpad(to_hex((classid::bigint & 65535) << 32 | objid::bigint), 12, '0') AS run_id
  FROM pg_locks
  WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND classid::bigint >> 16 = %(tag)s
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
SELECT waiting.run_id, waiting.pid,
  extract(epoch FROM clock_timestamp() - waiter.query_start)::float8 AS seconds,
  blocker.pid AS blocker_pid, holding.run_id AS blocker_run_id, activity.usename AS blocker_owner,
  activity.state AS blocker_state,
  extract(epoch FROM clock_timestamp() - activity.xact_start)::float8 AS blocker_seconds
FROM of_run AS waiting
CROSS JOIN LATERAL (SELECT DISTINCT unnest(pg_blocking_pids(waiting.pid))) AS blocker (pid)
LEFT JOIN of_run AS holding ON holding.pid = blocker.pid
LEFT JOIN pg_stat_activity AS waiter ON waiter.pid = waiting.pid
LEFT JOIN pg_stat_activity AS activity ON activity.pid = blocker.pid
WHERE %(run_id)s::text IS NULL OR waiting.run_id = %(run_id)s
ORDER BY seconds DESC NULLS LAST, waiting.run_id, waiting.pid, blocker.pid
