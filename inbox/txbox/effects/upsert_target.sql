-- The table that an upsert writes to, as the catalogue describes it.

-- name: find_table
-- A table by its name as it is written in SQL, and whether this user may do with any of its columns what an upsert does.
-- parameters: table_name text
-- returns: oid, schema_name, table_name, kind (as in pg_class), insert, select, update; no row if there is no such table
SELECT class.oid::bigint, namespace.nspname::text AS schema_name, class.relname::text AS table_name,
  class.relkind::text AS kind, has_any_column_privilege(class.oid, 'INSERT') AS "insert",
  has_any_column_privilege(class.oid, 'SELECT') AS "select", has_any_column_privilege(class.oid, 'UPDATE') AS "update"
FROM pg_class AS class JOIN pg_namespace AS namespace ON namespace.oid = class.relnamespace
WHERE class.oid = to_regclass(%(table_name)s)

-- name: read_columns
-- The columns of a table. Required is one that an INSERT must give a value; the type without its length is written so
-- that it has none when it is read again.
-- parameters: table_oid bigint
-- returns: name, type, type_without_length, is_text, is_domain, is_required, is_generated
SELECT attribute.attname::text, format_type(atttypid, atttypmod), format_type(atttypid, -1),
  typcategory = 'S', typtype = 'd',
  (attnotnull OR typnotnull) AND NOT atthasdef AND typdefault IS NULL AND attidentity = '',
  attgenerated <> '' OR attidentity = 'a'
FROM pg_attribute AS attribute JOIN pg_type AS type ON type.oid = atttypid
WHERE attrelid = %(table_oid)s::bigint AND attnum > 0 AND NOT attisdropped
ORDER BY attnum

-- name: read_keys
-- The columns of each unique key that ON CONFLICT can take: on columns alone, of all rows, checked at once. The primary
-- key comes first.
-- parameters: table_oid bigint
-- returns: columns, is_primary
SELECT ARRAY(
    SELECT attname::text FROM unnest(indkey::int2[]) WITH ORDINALITY AS part (attnum, place)
    JOIN pg_attribute AS attribute ON attrelid = indrelid AND attribute.attnum = part.attnum
    WHERE place <= indnkeyatts ORDER BY place
  ), indisprimary
FROM pg_index JOIN pg_class AS class ON class.oid = indexrelid
WHERE indrelid = %(table_oid)s::bigint AND indisunique AND indisvalid AND indimmediate AND NOT indisexclusion
  AND indpred IS NULL AND indexprs IS NULL
ORDER BY indisprimary DESC, relname
