-- What keeps Postgres from cleaning up.

-- name: snapshot_holders
-- The oldest transaction number that is still needed in a database decides what Postgres cleans up in its tables. A
-- session needs its own number and its snapshot's; a slot counts whatever its database. VACUUM itself is left out.
-- https://www.postgresql.org/docs/current/routine-vacuuming.html
-- An ordinary user cannot see what others run: there is null, and a note instead of the query.
-- parameters: seconds double precision, transactions bigint (that long with so many), many_transactions bigint (or more
--   than that at any age), limit bigint
-- returns: kind, pid, owner, name, state, seconds, transactions, query; the oldest first
WITH holders AS (
  SELECT CASE backend_type WHEN 'walsender' THEN 'standby' ELSE 'session' END AS kind, pid, usename AS owner,
    application_name AS name, state, extract(epoch FROM clock_timestamp() - xact_start)::float8 AS seconds,
    greatest(age(backend_xid), age(backend_xmin)) AS transactions, query
  FROM pg_stat_activity AS activity
  WHERE (datid IS NULL OR datname = current_database()) AND pid <> pg_backend_pid()
    AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL)
    AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum AS vacuum WHERE vacuum.pid = activity.pid)
  UNION ALL
  SELECT 'prepared transaction', NULL, owner, gid, NULL,
    extract(epoch FROM clock_timestamp() - prepared)::float8, age(transaction), NULL
  FROM pg_prepared_xacts WHERE database = current_database()
  UNION ALL
  SELECT 'replication slot', active_pid, NULL, slot_name, CASE WHEN active THEN 'active' ELSE 'inactive' END, NULL,
    age(xmin), NULL
  FROM pg_replication_slots WHERE xmin IS NOT NULL
)
SELECT kind, pid, owner, name, state, seconds, transactions, query FROM holders
WHERE (seconds >= %(seconds)s AND transactions >= %(transactions)s) OR transactions >= %(many_transactions)s
ORDER BY transactions DESC, seconds DESC NULLS LAST LIMIT %(limit)s

-- name: sees_all_sessions
-- Whether this user may see what others run.
-- parameters: none
-- returns: a boolean
SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')
