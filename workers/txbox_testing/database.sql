-- The database of a trial: its tables, and its sessions.

-- name: list_tables
-- The tables that hold rows: partitions, not what is partitioned.
-- parameters: inbox text (the name of txbox's inbox)
-- returns: schema, name, beside_inbox (a boolean: it is in the inbox's schema), in a fixed order
SELECT namespace.nspname AS schema, class.relname AS name,
  COALESCE(class.relnamespace = (
    SELECT inbox.relnamespace FROM pg_catalog.pg_class AS inbox WHERE inbox.oid = pg_catalog.to_regclass(%(inbox)s)
  ), false) AS beside_inbox
FROM pg_catalog.pg_class AS class JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
WHERE class.relkind = 'r' AND class.relpersistence <> 't'
  AND namespace.nspname <> 'information_schema' AND namespace.nspname !~ '^pg_'
ORDER BY 1, 2

-- name: end_sessions
-- End every other session of this database; those that are ending still count.
-- parameters: none
-- returns: how many there are
SELECT count(pg_catalog.pg_terminate_backend(pid))
FROM pg_catalog.pg_stat_activity
WHERE datname = pg_catalog.current_database() AND pid <> pg_catalog.pg_backend_pid() AND backend_type = 'client backend'

-- name: ignore_constraints
-- Until the transaction ends, neither triggers nor foreign keys look at what is restored. Needs a superuser.
-- parameters: none
-- returns: one row
SELECT pg_catalog.set_config('session_replication_role', 'replica', true)
