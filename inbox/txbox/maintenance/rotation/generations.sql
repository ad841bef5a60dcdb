-- The generations of a rotating inbox: partitions of processed_message, the newest of which records ids.
--
-- The changes are PL/pgSQL blocks, so that the exclusive lock is not held over round trips. A percent sign of format()
-- is doubled for psycopg. Blocks take no parameters; a value for one is a setting of the transaction.

-- name: rotates
-- Whether the inbox rotates.
-- parameters: none
-- returns: a boolean; null if there is no inbox
SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass('{{literal(processed_message)}}')

-- name: generations
-- The generations, oldest first. Rows are the planner's estimate; bytes include the primary key.
-- parameters: none
-- returns: generation, opened_at, closed_at (null: it is the current one), rows, bytes
SELECT generation.generation, {{microseconds(generation.opened_at)}} AS opened_at,
  {{microseconds(generation.closed_at)}} AS closed_at, greatest(part.reltuples, 0)::bigint AS rows,
  pg_total_relation_size(part.oid) AS bytes
FROM {{inbox_generation}} AS generation
JOIN pg_class AS inbox ON inbox.oid = '{{literal(processed_message)}}'::regclass
JOIN pg_inherits ON inhparent = inbox.oid
JOIN pg_class AS part ON part.oid = inhrelid AND part.relname = inbox.relname || '_g' || generation.generation
ORDER BY generation.generation

-- name: rotate
-- Open a new generation. The lock waits until every transaction that has recorded, or looked for ids, has ended. So
-- what was recorded before is committed, and what is recorded behind it has a snapshot that sees it (see inbox.sql).
-- The new generation has the tablespaces and storage parameters of the one before.
-- parameters: none
-- returns: nothing
DO $txbox$
DECLARE
  inbox record;
  kept record;
  next integer;
  part text;
  tablespaces text[];
BEGIN
  LOCK TABLE ONLY {{processed_message}} IN ACCESS EXCLUSIVE MODE;
  SELECT t.oid::regclass AS name, t.relkind, n.nspname AS schema, t.relname, t.relowner::regrole AS owner
    INTO inbox FROM pg_class AS t JOIN pg_namespace AS n ON n.oid = t.relnamespace
    WHERE t.oid = '{{literal(processed_message)}}'::regclass;
  IF inbox.relkind <> 'p' THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('%%s does not rotate', inbox.name),
      HINT = 'txbox db rotate-inbox';
  END IF;
  SELECT max(generation) + 1 INTO next FROM {{inbox_generation}};
  part := format('%%I.%%I', inbox.schema, inbox.relname || '_g' || next);
  SELECT array_agg(coalesce(own.spcname, usual.spcname) ORDER BY t.relkind = 'i') INTO tablespaces
    FROM pg_class AS t JOIN pg_database AS here ON here.datname = current_database()
    JOIN pg_tablespace AS usual ON usual.oid = here.dattablespace
    LEFT JOIN pg_tablespace AS own ON own.oid = t.reltablespace
    WHERE t.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = inbox.schema)
      AND t.relname IN (inbox.relname || '_g' || (next - 1), inbox.relname || '_g' || (next - 1) || '_pkey');
  EXECUTE format('CREATE TABLE %%s PARTITION OF %%s (CONSTRAINT %%I PRIMARY KEY (subscriber_id, message_id) '
    'USING INDEX TABLESPACE %%I) FOR VALUES IN (%%s) TABLESPACE %%I', part, inbox.name,
    inbox.relname || '_g' || next || '_pkey', coalesce(tablespaces[2], tablespaces[1]), next, tablespaces[1]);
  EXECUTE format('ALTER TABLE %%s OWNER TO %%s', part, inbox.owner);
  FOR kept IN
    SELECT CASE WHEN t.relkind = 'i' THEN 'INDEX' ELSE 'TABLE' END AS kind,
      CASE WHEN t.relkind = 'i' THEN '_pkey' ELSE '' END AS ending,
      string_agg(format('%%I = %%L', split_part(option, '=', 1), substr(option, strpos(option, '=') + 1)), ', ') AS options
    FROM pg_class AS t, unnest(t.reloptions) AS option
    WHERE t.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = inbox.schema)
      AND t.relname IN (inbox.relname || '_g' || (next - 1), inbox.relname || '_g' || (next - 1) || '_pkey')
    GROUP BY t.relkind
  LOOP
    EXECUTE format('ALTER %%s %%I.%%I SET (%%s)', kept.kind, inbox.schema, inbox.relname || '_g' || next || kept.ending,
      kept.options);
  END LOOP;
  EXECUTE format('ALTER TABLE ONLY %%s ALTER generation SET DEFAULT %%s', inbox.name, next);
  EXECUTE format('CREATE OR REPLACE VIEW %%s AS SELECT subscriber_id, message_id FROM %%s WHERE generation < %%s',
    '{{literal(processed_earlier)}}'::regclass, inbox.name, next);
  UPDATE {{inbox_generation}} SET closed_at = clock_timestamp() WHERE closed_at IS NULL;
  INSERT INTO {{inbox_generation}} (generation, opened_at) VALUES (next, clock_timestamp());
END $txbox$

-- name: forgettable
-- Generations whose ids all lie behind their subscribers' horizons: a message is recorded after it was sent, so it was
-- sent before its generation was closed. The subscribers are found by one lookup in the primary key each. A generation
-- that an archive does not have yet stays.
-- parameters: slack_seconds double precision (by which clocks may differ), settled jsonb (horizons in seconds since 1970,
--   by subscriber, that every running transaction sees; nothing beyond them goes)
-- returns: generation, when it was closed in microseconds since 1970
SELECT generation.generation, {{microseconds(generation.closed_at)}} FROM {{inbox_generation}} AS generation
WHERE isfinite(generation.closed_at) AND NOT EXISTS (
  SELECT FROM {{archive}} AS lake
  WHERE coalesce(lake.archived_upto, '-infinity') <= generation.closed_at + make_interval(secs => %(slack_seconds)s)
) AND NOT EXISTS (
  WITH RECURSIVE found AS (
    (SELECT subscriber_id FROM {{processed_message}} AS processed
      WHERE processed.generation = generation.generation ORDER BY subscriber_id LIMIT 1)
    UNION ALL
    SELECT (
      SELECT processed.subscriber_id FROM {{processed_message}} AS processed
      WHERE processed.generation = generation.generation AND processed.subscriber_id > found.subscriber_id
      ORDER BY processed.subscriber_id LIMIT 1
    )
    FROM found WHERE found.subscriber_id IS NOT NULL
  )
  SELECT FROM found LEFT JOIN {{inbox_horizon}} AS reached USING (subscriber_id)
  WHERE found.subscriber_id IS NOT NULL AND (
    reached.horizon IS NULL
    OR least(reached.horizon,
        to_timestamp(coalesce((%(settled)s::jsonb ->> found.subscriber_id)::double precision, '-infinity')))
      <= generation.closed_at + make_interval(secs => %(slack_seconds)s)
  )
)
ORDER BY generation.generation

-- fragment: refuses
letter.redriven_at IS NULL AND (letter.discarded_at IS NULL OR letter.discarded_at >= coalesce(
  (SELECT reached.horizon FROM {{inbox_horizon}} AS reached WHERE reached.subscriber_id = letter.subscriber_id),
  '-infinity'))

-- name: move_parked
-- Move rows of letters that wait, and of letters discarded since the horizon, into the current generation. The letters
-- are locked first, as a redrive does: a redrive finds the row before or after, never while it is moved (a DELETE that
-- waits for a row that is moved fails with 40001). Locked letters are left for the next time.
-- parameters: generation int, most int
-- returns: nothing; the count of rows
WITH waiting AS MATERIALIZED (
  SELECT letter.subscriber_id, letter.message_id FROM {{dead_letter}} AS letter
  WHERE {{refuses}} AND EXISTS (
    SELECT FROM {{processed_message}} AS parked
    WHERE parked.generation = %(generation)s AND parked.subscriber_id = letter.subscriber_id
      AND parked.message_id = letter.message_id AND parked.dead_letter_id IS NOT NULL
  )
  ORDER BY letter.dead_letter_id LIMIT %(most)s
  FOR UPDATE OF letter SKIP LOCKED
)
UPDATE {{processed_message}} AS parked SET generation = (SELECT max(newest.generation) FROM {{inbox_generation}} AS newest)
FROM waiting
WHERE parked.generation = %(generation)s AND parked.subscriber_id = waiting.subscriber_id
  AND parked.message_id = waiting.message_id AND parked.dead_letter_id IS NOT NULL

-- name: name_generation
-- Name a generation for detach_generation, in this transaction. Its number alone may be that of another one, if the
-- inbox was turned back and rotates again.
-- parameters: generation int, closed_at bigint (microseconds since 1970)
-- returns: the settings
SELECT set_config('txbox.generation', %(generation)s::text, true),
  set_config('txbox.closed_at', %(closed_at)s::text, true)

-- fragment: name_of_generation
(SELECT format('%%I.%%I', n.nspname, t.relname || '_g' || old)
    FROM pg_class AS t JOIN pg_namespace AS n ON n.oid = t.relnamespace
    WHERE t.oid = '{{literal(processed_message)}}'::regclass)

-- name: detach_generation
-- Detach a closed generation from the inbox, unless it still has rows of letters that wait. Its files are not removed
-- here: that takes as long as the file system needs, in the commit, with the lock held.
-- parameters: none
-- returns: nothing; inbox_generation says whether it is detached: it was closed before all time
DO $txbox$
DECLARE
  old integer := current_setting('txbox.generation')::integer;
  inbox regclass := '{{literal(processed_message)}}';
BEGIN
  LOCK TABLE ONLY {{processed_message}} IN ACCESS EXCLUSIVE MODE;
  IF NOT EXISTS (
    SELECT FROM {{inbox_generation}}
    WHERE generation = old AND {{microseconds(closed_at)}} = current_setting('txbox.closed_at')::bigint
  ) OR EXISTS (
    SELECT FROM {{dead_letter}} AS letter JOIN {{processed_message}} AS parked USING (subscriber_id, message_id)
    WHERE {{refuses}} AND parked.generation = old AND parked.dead_letter_id IS NOT NULL
  ) THEN
    RETURN;
  END IF;
  EXECUTE format('ALTER TABLE %%s DETACH PARTITION %%s', inbox, {{name_of_generation}});
  UPDATE {{inbox_generation}} SET closed_at = '-infinity' WHERE generation = old;
END $txbox$

-- name: drop_detached
-- Drop the table of a detached generation. Nothing else uses it, so nobody waits.
-- parameters: none
-- returns: nothing
DO $txbox$
DECLARE
  old integer;
BEGIN
  SELECT generation INTO old FROM {{inbox_generation}} WHERE closed_at = '-infinity'
    ORDER BY generation LIMIT 1 FOR UPDATE;
  IF FOUND THEN
    EXECUTE format('DROP TABLE IF EXISTS %%s', {{name_of_generation}});
    DELETE FROM {{inbox_generation}} WHERE generation = old;
  END IF;
END $txbox$

-- name: detached
-- The generations that are detached and not yet dropped.
-- parameters: none
-- returns: generation
SELECT generation FROM {{inbox_generation}} WHERE closed_at = '-infinity'
