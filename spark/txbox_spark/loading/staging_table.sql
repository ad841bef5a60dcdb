-- A staging table in the catalogue. The statements with computed columns are in staging_table.py.

-- name: describe
-- A staging table's comment, and whether it has partitions.
-- parameters: staging_table text (quoted, with its schema)
-- returns: comment, has_partitions; no row if there is no such table
SELECT obj_description(oid, 'pg_class'), relkind = 'p' FROM pg_class WHERE oid = to_regclass(%(staging_table)s)
