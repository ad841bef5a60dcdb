-- The table that an upsert writes to, as the catalogue describes it.

-- name: find_table
-- A table by its name as written in SQL, and whether this user may do what an upsert does with any of its columns.
-- parameters: table_name text
-- returns: oid, schema_name, table_name, kind (as in pg_class), insert, select, update; no row if there is no such table
SELECT class.oid::bigint, namespace.nspname::text AS schema_name, class.relname::text AS table_name,
  class.relkind::text AS kind, has_any_column_privilege(class.oid, 'INSERT') AS "insert",
  has_any_column_privilege(class.oid, 'SELECT') AS "select", has_any_column_privilege(class.oid, 'UPDATE') AS "update"
FROM pg_class AS class JOIN pg_namespace AS namespace ON namespace.oid = class.relnamespace
WHERE class.oid = to_regclass(%(table_name)s)

-- name: read_columns
-- The columns of a table. A column is required if an INSERT must give it a value. The type without its length is
-- written so that it has none when it is read again. In a key, values are compared as the column stores them: numbers
-- and times are rounded to its digits, and a domain of text is compared as its base type, to which a cast truncates
-- nothing.
-- parameters: table_oid bigint
-- returns: name, type, type_without_length, compared_as, is_text, is_domain, is_required, is_generated
SELECT attribute.attname::text, format_type(atttypid, atttypmod), format_type(atttypid, -1),
  CASE WHEN typcategory IN ('N', 'D', 'T') THEN format_type(atttypid, atttypmod)
    WHEN typcategory = 'S' AND typtype = 'd' THEN format_type(typbasetype, -1)
    ELSE format_type(atttypid, -1) END,
  typcategory = 'S', typtype = 'd',
  (attnotnull OR typnotnull) AND NOT atthasdef AND typdefault IS NULL AND attidentity = '',
  attgenerated <> '' OR attidentity = 'a'
FROM pg_attribute AS attribute JOIN pg_type AS type ON type.oid = atttypid
WHERE attrelid = %(table_oid)s::bigint AND attnum > 0 AND NOT attisdropped
ORDER BY attnum

-- name: read_keys
-- The columns of each unique key that ON CONFLICT can take: on columns only, over all rows, checked immediately; with
-- the collation, for SQL, of each column whose texts may be equal but not the same, and whether nulls in the key are
-- distinct (indnullsnotdistinct exists since PostgreSQL 15). The primary key comes first.
-- parameters: table_oid bigint
-- returns: columns, collations, nulls_differ, is_primary
SELECT ARRAY(
    SELECT attname::text FROM unnest(indkey::int2[]) WITH ORDINALITY AS part (attnum, place)
    JOIN pg_attribute AS attribute ON attrelid = indrelid AND attribute.attnum = part.attnum
    WHERE place <= indnkeyatts ORDER BY place
  ), ARRAY(
    SELECT quote_ident(nspname) || '.' || quote_ident(collname)
    FROM unnest(indcollation::oid[]) WITH ORDINALITY AS part (collation_oid, place)
    LEFT JOIN pg_collation AS collated ON collated.oid = collation_oid AND NOT collisdeterministic
    LEFT JOIN pg_namespace AS namespace ON namespace.oid = collnamespace
    ORDER BY place
  ), coalesce(to_jsonb(pg_index) ->> 'indnullsnotdistinct', 'false') = 'false' AND EXISTS (
    SELECT FROM unnest(indkey::int2[]) WITH ORDINALITY AS part (attnum, place)
    JOIN pg_attribute AS attribute ON attrelid = indrelid AND attribute.attnum = part.attnum
    WHERE place <= indnkeyatts AND NOT attnotnull
  ), indisprimary
FROM pg_index JOIN pg_class AS class ON class.oid = indexrelid
WHERE indrelid = %(table_oid)s::bigint AND indisunique AND indisvalid AND indimmediate AND NOT indisexclusion
  AND indpred IS NULL AND indexprs IS NULL
ORDER BY indisprimary DESC, relname
