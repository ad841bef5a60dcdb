-- Staging tables of bulk loads in the catalogue: they are beside txbox's tables, with the run in their names.

-- name: schema_of_tables
-- The schema that txbox's tables are in.
-- parameters: none
-- returns: schema, quoted
SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = '{{literal(bulk_load)}}'::regclass

-- fragment: staging_tables
FROM pg_class AS staging
WHERE staging.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = '{{literal(bulk_load)}}'::regclass)
  AND staging.relkind IN ('p', 'r') AND NOT staging.relispartition AND staging.relname ~ %(pattern)s

-- name: of_run
-- The staging tables of one run. Spark creates one without partitions if ours was dropped before the first row came.
-- parameters: pattern text (of their names)
-- returns: relname
SELECT staging.relname {{staging_tables}}

-- name: abandoned
-- Staging tables of runs that are finished, that are not in the ledger (a run is there before its tables), or that have
-- had no heartbeat for that long.
-- parameters: pattern text (of their names), run_pattern text (with the run as its group), abandoned_seconds double
--   precision (null: those of runs that are not finished stay)
-- returns: relname
SELECT staging.relname {{staging_tables}}
  AND NOT EXISTS (
    SELECT FROM {{bulk_load}} AS run
    WHERE run.run_id = substring(staging.relname FROM %(run_pattern)s) AND run.finished_at IS NULL
      AND (run.heartbeat_at > now() - make_interval(secs => %(abandoned_seconds)s::double precision)) IS NOT FALSE
  )

-- name: partitions
-- The partitions of a table.
-- parameters: staging_table text (quoted, with its schema)
-- returns: name, quoted
SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = to_regclass(%(staging_table)s)

-- name: drop_tables
-- Drop tables if they still exist.
-- parameters: none; {tables} is replaced by their names
-- returns: nothing
DROP TABLE IF EXISTS {tables}
