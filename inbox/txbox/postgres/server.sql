-- Questions to Postgres about itself.

-- name: backend_pid
-- The process id of the server that answers; behind a pooler, not the one reported when the connection was made.
-- parameters: none
-- returns: pid
SELECT pg_backend_pid()

-- name: named_by_asyncpg
-- Whether this server has statements under asyncpg's own names for them; it does not if a pooler renames them.
-- parameters: none
-- returns: true or false
SELECT EXISTS (SELECT FROM pg_prepared_statements WHERE strpos(name, '__asyncpg_') = 1)

-- name: sessions_at_work
-- Which of these server processes are at work for their clients. A process that has waited for its client's next
-- message for so many seconds is not at work, nor is one that has ended.
-- parameters: pids int[], seconds double precision
-- returns: pid
SELECT pid FROM pg_stat_activity
WHERE pid = ANY(%(pids)s::int[])
  AND (
    wait_event IS DISTINCT FROM 'ClientRead'
    OR clock_timestamp() - state_change < make_interval(secs => %(seconds)s)
  ) IS NOT FALSE

-- name: row_estimate
-- Postgres's estimate of a table's rows: the planner's, from the last ANALYZE, or the count of live rows, which a crash
-- of the server resets. For a partitioned table, the sum over its partitions.
-- parameters: table_name text (quoted)
-- returns: rows
SELECT coalesce(sum(greatest(reltuples, pg_stat_get_live_tuples(oid), 0)), 0)::bigint FROM pg_class
WHERE oid IN (
  SELECT %(table_name)s::regclass WHERE (SELECT relkind FROM pg_class WHERE oid = %(table_name)s::regclass) <> 'p'
  UNION ALL SELECT inhrelid FROM pg_inherits WHERE inhparent = %(table_name)s::regclass
)

-- name: lock_timeout
-- How long this transaction waits for a lock.
-- parameters: none
-- returns: the setting; 0: for ever
SELECT current_setting('lock_timeout')

-- name: bound_wait
-- Wait for locks no longer than this, in this transaction.
-- parameters: lock_timeout text
-- returns: the setting
SELECT set_config('lock_timeout', %(lock_timeout)s, true)

-- name: takes_no_writes
-- Whether this transaction cannot write: the server is a standby, or the session's transactions are read-only.
-- parameters: none
-- returns: true or false
SELECT current_setting('transaction_read_only')::boolean

-- name: no_time_limit
-- Let this transaction take as long as it needs, whatever its role's limits; transaction_timeout exists since
-- PostgreSQL 17.
-- parameters: none
-- returns: the settings
SELECT set_config(name, '0', true) FROM pg_settings WHERE name IN ('statement_timeout', 'transaction_timeout')

-- name: running_transactions
-- The transactions of this database, without those of VACUUM. Every role may see them.
-- parameters: none
-- returns: virtualtransaction
SELECT lock.virtualtransaction FROM pg_locks AS lock JOIN pg_stat_activity AS activity ON activity.pid = lock.pid
WHERE lock.locktype = 'virtualxid' AND lock.granted AND lock.pid <> pg_backend_pid()
  AND activity.datname = current_database()
  AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum AS vacuum WHERE vacuum.pid = lock.pid)
