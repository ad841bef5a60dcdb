-- The database of a trial: its tables, and its sessions.

-- name: list_tables
-- The tables that hold rows: partitions, but not partitioned tables.
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

-- name: list_columns
-- The columns of all tables, and whether they vary by nature: times, UUIDs, values from a sequence, generated ones, and
-- foreign keys to these.
-- parameters: none
-- returns: schema, name, column_name, varies
WITH RECURSIVE varying (relation, number) AS (
  SELECT attribute.attrelid, attribute.attnum
  FROM pg_catalog.pg_attribute AS attribute
  JOIN pg_catalog.pg_type AS type ON type.oid = attribute.atttypid
  LEFT JOIN pg_catalog.pg_attrdef AS preset
    ON preset.adrelid = attribute.attrelid AND preset.adnum = attribute.attnum
  WHERE attribute.attnum > 0 AND NOT attribute.attisdropped AND (
    type.typcategory = 'D' OR 'pg_catalog.uuid'::pg_catalog.regtype IN (type.oid, type.typbasetype)
    OR attribute.attidentity <> '' OR attribute.attgenerated <> ''
    OR pg_catalog.pg_get_expr(preset.adbin, preset.adrelid) ~ 'nextval[(]'
  )
  UNION
  SELECT reference.conrelid, reference.conkey[position]
  FROM varying
  JOIN pg_catalog.pg_constraint AS reference ON reference.confrelid = varying.relation AND reference.contype = 'f'
  CROSS JOIN LATERAL pg_catalog.generate_subscripts(reference.confkey, 1) AS position
  WHERE reference.confkey[position] = varying.number
)
SELECT namespace.nspname AS schema, class.relname AS name, attribute.attname AS column_name,
  EXISTS (
    SELECT FROM varying WHERE varying.relation = class.oid AND varying.number = attribute.attnum
  ) AS varies
FROM pg_catalog.pg_class AS class
JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
JOIN pg_catalog.pg_attribute AS attribute ON attribute.attrelid = class.oid
WHERE class.relkind = 'r' AND class.relpersistence <> 't' AND attribute.attnum > 0 AND NOT attribute.attisdropped
  AND namespace.nspname <> 'information_schema' AND namespace.nspname !~ '^pg_'

-- name: end_sessions
-- End every other session of this database; those that are ending still count.
-- parameters: none
-- returns: how many there are
SELECT count(pg_catalog.pg_terminate_backend(pid))
FROM pg_catalog.pg_stat_activity
WHERE datname = pg_catalog.current_database() AND pid <> pg_catalog.pg_backend_pid() AND backend_type = 'client backend'

-- name: ignore_constraints
-- Until the transaction ends, disable triggers and foreign keys for what is restored. Needs a superuser.
-- parameters: none
-- returns: one row
SELECT pg_catalog.set_config('session_replication_role', 'replica', true)
