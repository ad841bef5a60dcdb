-- Staging tables in the catalogue. Statements with computed columns are in staging_table.py.

-- name: describe
-- Return a staging table's comment, and whether it has partitions.
-- parameters: staging_table text (quoted, with its schema)
-- returns: comment, has_partitions; no row if the table does not exist
SELECT obj_description(oid, 'pg_class'), relkind = 'p' FROM pg_class WHERE oid = to_regclass(%(staging_table)s)
