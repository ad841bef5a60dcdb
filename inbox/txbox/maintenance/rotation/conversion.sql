-- Turning the inbox into a rotating one, and back. Exclusive steps are short; long steps are online.

-- name: form
-- Which form the inbox has.
-- parameters: none
-- returns: partitioned, has_generation (the column), has_check (of one generation), is_valid (that check);
--   no row if there is no inbox
SELECT inbox.relkind = 'p' AS partitioned,
  EXISTS (SELECT FROM pg_attribute WHERE attrelid = inbox.oid AND attname = 'generation' AND NOT attisdropped)
    AS has_generation,
  one.oid IS NOT NULL AS has_check, coalesce(one.convalidated, false) AS is_valid
FROM pg_class AS inbox
LEFT JOIN pg_constraint AS one ON one.conrelid = inbox.oid AND one.contype = 'c'
  AND one.conname = 'first_generation'
WHERE inbox.oid = to_regclass('{{literal(processed_message)}}')

-- name: hindrances
-- What others have attached to the inbox that would be left behind with one generation, or be lost.
-- parameters: none
-- returns: what it is, in words
WITH inbox AS (SELECT oid, relname, relrowsecurity, relacl FROM pg_class
  WHERE oid = '{{literal(processed_message)}}'::regclass)
SELECT DISTINCT 'view ' || rule.ev_class::regclass FROM inbox
  JOIN pg_depend ON refobjid = inbox.oid AND refclassid = 'pg_class'::regclass AND classid = 'pg_rewrite'::regclass
  JOIN pg_rewrite AS rule ON rule.oid = objid
  WHERE rule.ev_class NOT IN (inbox.oid, '{{literal(processed_earlier)}}'::regclass)
UNION ALL SELECT 'rule ' || rule.rulename FROM inbox JOIN pg_rewrite AS rule ON rule.ev_class = inbox.oid
UNION ALL SELECT 'foreign key ' || conname || ' of ' || conrelid::regclass FROM inbox
  JOIN pg_constraint ON (confrelid = inbox.oid OR conrelid = inbox.oid) AND contype = 'f'
UNION ALL SELECT 'constraint ' || conname FROM inbox
  JOIN pg_constraint ON conrelid = inbox.oid AND contype IN ('u', 'x', 'c')
  WHERE conname <> 'first_generation'
UNION ALL SELECT 'trigger ' || tgname FROM inbox JOIN pg_trigger ON tgrelid = inbox.oid AND NOT tgisinternal
UNION ALL SELECT 'publication ' || pubname FROM inbox
  JOIN pg_publication_rel ON prrelid = inbox.oid JOIN pg_publication ON pg_publication.oid = prpubid
UNION ALL SELECT 'publication ' || publication.pubname || ' (without publish_via_partition_root)'
  FROM pg_publication_tables AS published JOIN pg_publication AS publication USING (pubname)
  JOIN pg_class AS t ON t.relname = published.tablename
  JOIN pg_namespace AS n ON n.oid = t.relnamespace AND n.nspname = published.schemaname
  WHERE t.oid = (SELECT oid FROM inbox) AND NOT publication.pubviaroot
    AND NOT EXISTS (SELECT FROM pg_publication_rel WHERE prpubid = publication.oid AND prrelid = t.oid)
UNION ALL SELECT 'index ' || indexrelid::regclass FROM inbox
  JOIN pg_index ON indrelid = inbox.oid AND NOT indisprimary
  WHERE NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid)
UNION ALL SELECT 'row security' FROM inbox WHERE relrowsecurity
UNION ALL SELECT 'a right on the column ' || attname FROM inbox
  JOIN pg_attribute ON attrelid = inbox.oid AND attacl IS NOT NULL AND NOT attisdropped
UNION ALL SELECT 'inheritance: ' || inhrelid::regclass || ' of ' || inhparent::regclass FROM inbox
  JOIN pg_inherits ON inhparent = inbox.oid OR inhrelid = inbox.oid
  WHERE (SELECT relkind FROM pg_class WHERE pg_class.oid = inbox.oid) <> 'p'
ORDER BY 1

-- name: add_generation
-- All rows are of generation 1. This changes the catalogue alone.
-- parameters: none
-- returns: nothing
ALTER TABLE {{processed_message}} ADD COLUMN IF NOT EXISTS generation integer NOT NULL DEFAULT 1

-- name: add_check
-- A promise about future rows. Its name must be unique only within the table, and is short under every prefix.
-- parameters: none
-- returns: nothing
ALTER TABLE {{processed_message}} ADD CONSTRAINT first_generation CHECK (generation = 1) NOT VALID

-- name: validate_check
-- Read all rows once while others go on, so that none has to be read behind the exclusive lock.
-- parameters: none
-- returns: nothing
ALTER TABLE {{processed_message}} VALIDATE CONSTRAINT first_generation

-- fragment: copy_rights_and_comments
FOR other IN
  SELECT privilege_type AS privilege, is_grantable,
    CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE grantee::regrole::text END AS role
  FROM pg_class, aclexplode(relacl) WHERE pg_class.oid = former
LOOP
  EXECUTE format('GRANT %%s ON %%s TO %%s%%s', other.privilege, now_it, other.role,
    CASE WHEN other.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END);
END LOOP;
EXECUTE format('ALTER TABLE %%s OWNER TO %%s', now_it, inbox.owner);
IF obj_description(former, 'pg_class') IS NOT NULL THEN
  EXECUTE format('COMMENT ON TABLE %%s IS %%L', now_it, obj_description(former, 'pg_class'));
END IF;
FOR other IN SELECT attname AS name, col_description(former, attnum) AS comment FROM pg_attribute
  WHERE attrelid = former AND attnum > 0 AND NOT attisdropped AND attname <> 'generation'
LOOP
  EXECUTE format('COMMENT ON COLUMN %%s.%%I IS %%L', now_it, other.name, other.comment);
END LOOP;

-- name: make_rotating
-- The table becomes generation 1 of a new one of its name. The version's mark moves from the primary key, which the new
-- table lacks, to the column. A publication via the partition root sends deleted rows with the root's replica identity.
-- The root has no key, so the default would stop the subscription. What is written uses the generations' own identity.
-- parameters: none
-- returns: nothing
DO $txbox$
DECLARE
  inbox record;
  other record;
  former regclass;
  now_it text;
BEGIN
  LOCK TABLE ONLY {{processed_message}} IN ACCESS EXCLUSIVE MODE;
  SELECT t.oid::regclass AS oid, t.relkind, format('%%I.%%I', n.nspname, t.relname) AS name, t.relname,
      n.nspname AS schema, t.relowner::regrole AS owner, k.conname AS key,
      coalesce(obj_description(k.oid, 'pg_constraint'), '') AS mark
    INTO inbox FROM pg_class AS t JOIN pg_namespace AS n ON n.oid = t.relnamespace
    JOIN pg_constraint AS k ON k.conrelid = t.oid AND k.contype = 'p'
    WHERE t.oid = '{{literal(processed_message)}}'::regclass;
  former := inbox.oid;
  now_it := inbox.name;
  EXECUTE format('ALTER TABLE %%s RENAME CONSTRAINT %%I TO %%I', former, inbox.key, inbox.relname || '_g1_pkey');
  EXECUTE format('ALTER TABLE %%s RENAME TO %%I', former, inbox.relname || '_g1');
  EXECUTE format('CREATE TABLE %%s (LIKE %%s INCLUDING DEFAULTS INCLUDING STORAGE '
    'INCLUDING COMPRESSION) PARTITION BY LIST (generation)', now_it, former);
  EXECUTE format('ALTER TABLE %%s ATTACH PARTITION %%s FOR VALUES IN (1)', now_it, former);
  EXECUTE format('ALTER TABLE %%s REPLICA IDENTITY FULL', now_it);
  EXECUTE format('ALTER TABLE %%s DROP CONSTRAINT first_generation', former);
  {{copy_rights_and_comments}}
  EXECUTE format('COMMENT ON COLUMN %%s.generation IS %%L', now_it, inbox.mark);
  EXECUTE format('CREATE OR REPLACE VIEW %%s AS SELECT subscriber_id, message_id FROM %%s WHERE generation < 1',
    '{{literal(processed_earlier)}}'::regclass, now_it);
  DELETE FROM {{inbox_generation}};
  INSERT INTO {{inbox_generation}} (generation, opened_at) VALUES (1, clock_timestamp());
END $txbox$

-- name: older_generations
-- The closed generations, and how many blocks they have.
-- parameters: none
-- returns: generation, when it was closed in microseconds since 1970, blocks
SELECT generation.generation, {{microseconds(generation.closed_at)}} AS closed_at,
  pg_relation_size(part.oid) / current_setting('block_size')::bigint AS blocks
FROM {{inbox_generation}} AS generation
JOIN pg_class AS inbox ON inbox.oid = '{{literal(processed_message)}}'::regclass
JOIN pg_inherits ON inhparent = inbox.oid
JOIN pg_class AS part ON part.oid = inhrelid AND part.relname = inbox.relname || '_g' || generation.generation
WHERE generation.closed_at IS NOT NULL ORDER BY generation.generation

-- name: move_rows
-- Move the rows of some blocks of a generation into the current one; rows of letters are moved with their letters.
-- parameters: generation int, first_row text, end_row text (row places)
-- returns: nothing; the count of rows
UPDATE {{processed_message}} AS processed
SET generation = (SELECT max(newest.generation) FROM {{inbox_generation}} AS newest)
WHERE processed.generation = %(generation)s AND processed.ctid >= %(first_row)s::tid
  AND processed.ctid < %(end_row)s::tid
  AND (processed.dead_letter_id IS NULL
    OR NOT EXISTS (SELECT FROM {{dead_letter}} AS letter WHERE letter.subscriber_id = processed.subscriber_id
      AND letter.message_id = processed.message_id))

-- name: move_lettered
-- Move rows of letters into the current generation, locking the letters first (see generations.sql).
-- parameters: generation int, most int
-- returns: nothing; the count of rows
WITH parked AS MATERIALIZED (
  SELECT letter.subscriber_id, letter.message_id FROM {{dead_letter}} AS letter
  WHERE EXISTS (
    SELECT FROM {{processed_message}} AS processed
    WHERE processed.generation = %(generation)s AND processed.subscriber_id = letter.subscriber_id
      AND processed.message_id = letter.message_id AND processed.dead_letter_id IS NOT NULL
  )
  ORDER BY letter.dead_letter_id LIMIT %(most)s
  FOR UPDATE OF letter SKIP LOCKED
)
UPDATE {{processed_message}} AS processed
SET generation = (SELECT max(newest.generation) FROM {{inbox_generation}} AS newest)
FROM parked
WHERE processed.generation = %(generation)s AND processed.subscriber_id = parked.subscriber_id
  AND processed.message_id = parked.message_id AND processed.dead_letter_id IS NOT NULL

-- name: is_empty
-- Whether a closed generation has no rows left; it gets no more.
-- parameters: generation int
-- returns: a boolean
SELECT NOT EXISTS (SELECT FROM {{processed_message}} WHERE generation = %(generation)s)

-- name: make_plain
-- The current generation becomes the table again, if it is the only one and everything detached has been dropped.
-- parameters: none
-- returns: nothing; the form says whether it is done
DO $txbox$
DECLARE
  inbox record;
  other record;
  former regclass;
  part regclass;
  now_it text;
  newest integer;
BEGIN
  LOCK TABLE ONLY {{processed_message}} IN ACCESS EXCLUSIVE MODE;
  IF EXISTS (SELECT FROM {{processed_earlier}}) OR EXISTS (
    SELECT FROM {{inbox_generation}} WHERE closed_at = '-infinity'
  ) THEN
    RETURN;
  END IF;
  SELECT t.oid::regclass AS oid, t.relkind, format('%%I.%%I', n.nspname, t.relname) AS name, t.relname,
      n.nspname AS schema, t.relowner::regrole AS owner,
      (SELECT col_description(t.oid, attnum) FROM pg_attribute WHERE attrelid = t.oid AND attname = 'generation') AS mark
    INTO inbox FROM pg_class AS t JOIN pg_namespace AS n ON n.oid = t.relnamespace
    WHERE t.oid = '{{literal(processed_message)}}'::regclass;
  SELECT max(generation) INTO newest FROM {{inbox_generation}};
  former := inbox.oid;
  now_it := inbox.name;
  part := format('%%I.%%I', inbox.schema, inbox.relname || '_g' || newest)::regclass;
  EXECUTE format('ALTER TABLE %%s DETACH PARTITION %%s', former, part);
  EXECUTE format('ALTER TABLE %%s RENAME TO %%I', former, inbox.relname || '_g');
  EXECUTE format('ALTER TABLE %%s RENAME TO %%I', part, inbox.relname);
  EXECUTE format('ALTER TABLE %%s RENAME CONSTRAINT %%I TO %%I', part, inbox.relname || '_g' || newest || '_pkey',
    inbox.relname || '_pkey');
  {{copy_rights_and_comments}}
  EXECUTE format('COMMENT ON CONSTRAINT %%I ON %%s IS %%L', inbox.relname || '_pkey', now_it, inbox.mark);
  EXECUTE format('CREATE OR REPLACE VIEW %%s AS SELECT subscriber_id, message_id FROM %%s WHERE false',
    '{{literal(processed_earlier)}}'::regclass, now_it);
  EXECUTE format('DROP TABLE %%s', former);
  EXECUTE format('ALTER TABLE %%s DROP COLUMN generation', now_it);
  DELETE FROM {{inbox_generation}};
END $txbox$

-- name: drop_generation_column
-- Undo what was begun on a table that does not rotate yet; the check goes with the column.
-- parameters: none
-- returns: nothing
ALTER TABLE {{processed_message}} DROP COLUMN IF EXISTS generation
