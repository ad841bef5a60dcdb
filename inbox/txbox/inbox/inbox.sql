-- The inbox: what a subscriber has processed. One insert for each message, in the transaction of its effect.
--
-- record_one and record_many do three things in an order that the data flow forces:
--
--   bound     remembers the transaction's lock_timeout and sets ours;
--   recorded  needs a row of bound, so it inserts under our timeout. If it meets a row of a transaction that has not
--             ended, ON CONFLICT waits for that transaction: this is the wait that is bounded;
--   SELECT    needs the count of recorded, so it restores the old lock_timeout last, whatever was inserted.
--
-- Where the inbox rotates, the row goes into the current generation, whose primary key decides; processed_earlier has
-- the ids of the older ones. A rotation waits until no transaction uses this table, and this statement takes its
-- snapshot after its locks, so it sees everything recorded in what the view covers:
--
--   A records in 1 ── A commits        B: a duplicate, by processed_earlier
--                       rotates: 2
--                                 B records
--
-- But at REPEATABLE READ and SERIALIZABLE, a snapshot older than the rotation does not see it. So the statement returns
-- the generation it recorded in, and require_generation checks whether the snapshot has it.
--
-- A redrive deletes a row, then sends the copy that is to be first. In the current generation, a copy that comes before
-- the redrive commits waits at the primary key. processed_earlier does not wait: it still has the row. So the statement
-- returns the duplicates it found there; find_earlier and await_redrives wait for whatever redrives them.
--
-- set_config(..., true) is local to the transaction, so nothing leaks through a transaction-mode pooler, and a timeout
-- (55P03) aborts the transaction, which undoes the setting as well.

-- fragment: to_check
CASE WHEN current_setting('transaction_isolation') <> 'read committed'
  AND found.generation <> '{{literal(processed_message)}}'::regclass THEN found.generation::bigint END

-- name: record_one
-- Record one id. Every message that is processed singly pays for this one statement.
-- parameters: lock_timeout text, subscriber_id text, message_id text, fingerprint bytea
-- returns: first (1, or 0 for a duplicate); the id, if it is a duplicate of an older generation, as an array (or null);
--   the lock_timeout that was, the generation to check (or null), when the transaction began in microseconds since 1970,
--   the server's process id
WITH bound AS MATERIALIZED (
  SELECT current_setting('lock_timeout') AS before, set_config('lock_timeout', %(lock_timeout)s, true)
), recorded AS (
  INSERT INTO {{processed_message}} (subscriber_id, message_id, fingerprint)
  SELECT %(subscriber_id)s::text, %(message_id)s::text, %(fingerprint)s::bytea FROM bound
  WHERE NOT EXISTS (
    SELECT FROM {{processed_earlier}} AS earlier
    WHERE earlier.subscriber_id = %(subscriber_id)s::text AND earlier.message_id = %(message_id)s::text
  )
  ON CONFLICT DO NOTHING
  RETURNING tableoid
)
SELECT found.first, CASE WHEN found.first = 0 THEN (
    SELECT array_agg(earlier.message_id) FROM {{processed_earlier}} AS earlier
    WHERE earlier.subscriber_id = %(subscriber_id)s::text AND earlier.message_id = %(message_id)s::text
  ) END,
  set_config('lock_timeout', bound.before, true), {{to_check}}, (extract(epoch FROM now()) * 1000000)::bigint,
  pg_backend_pid()
FROM bound, (SELECT count(*) AS first, min(tableoid) AS generation FROM recorded) AS found

-- name: record_many
-- Record many ids, which come sorted. (NOT EXISTS would look up each of them in each generation separately.) The
-- planner is not shown what is looked for in older generations. For few ids, or for a subscriber that they do not know,
-- it would each time find a plan for these very values cheaper than the kept one, and planning costs as much as
-- recording.
-- parameters: lock_timeout text, subscriber_id text, message_ids text[], fingerprints bytea[]
-- returns: how many are first; their ids, or null if all are or none is; the ids of those that are duplicates of an older
--   generation, or null; the lock_timeout that was, the generation to check (or null), when the transaction began in
--   microseconds since 1970, the server's process id
WITH bound AS MATERIALIZED (
  SELECT current_setting('lock_timeout') AS before, set_config('lock_timeout', %(lock_timeout)s, true)
), recorded AS (
  INSERT INTO {{processed_message}} (subscriber_id, message_id, fingerprint)
  SELECT %(subscriber_id)s::text, message.id, message.fingerprint
  FROM bound, unnest(%(message_ids)s::text[], %(fingerprints)s::bytea[]) AS message (id, fingerprint)
  WHERE message.id NOT IN (
    SELECT earlier.message_id FROM {{processed_earlier}} AS earlier
    WHERE earlier.subscriber_id = (SELECT %(subscriber_id)s::text)
      AND earlier.message_id = ANY((SELECT %(message_ids)s::text[])::text[])
  )
  ON CONFLICT DO NOTHING
  RETURNING message_id, tableoid
)
SELECT found.first, CASE WHEN found.first < cardinality(%(message_ids)s::text[]) THEN found.ids END,
  CASE WHEN found.first < cardinality(%(message_ids)s::text[]) THEN (
    SELECT array_agg(earlier.message_id) FROM {{processed_earlier}} AS earlier
    WHERE earlier.subscriber_id = (SELECT %(subscriber_id)s::text)
      AND earlier.message_id = ANY((SELECT %(message_ids)s::text[])::text[])
  ) END,
  set_config('lock_timeout', bound.before, true), {{to_check}}, (extract(epoch FROM now()) * 1000000)::bigint,
  pg_backend_pid()
FROM bound, (
  SELECT count(*) AS first, array_agg(message_id) AS ids, min(tableoid) AS generation FROM recorded
) AS found

-- name: require_generation
-- Whether this transaction's snapshot has a generation, and so everything recorded in the older ones. The snapshot
-- applies to pg_class, too; if its row was changed since, the snapshot has the old one.
-- parameters: generation bigint
-- returns: a row, if it has
SELECT FROM pg_class WHERE oid = %(generation)s::bigint::oid

-- name: refuse_snapshot
-- Fail as Postgres does for a snapshot that is too old, so that the transaction is aborted and run again.
-- parameters: none
-- returns: never
DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001', MESSAGE =
  'could not serialize access: the inbox was rotated after the snapshot of this transaction'; END $$

-- name: fingerprints
-- The fingerprints of ids that are duplicates.
-- parameters: subscriber_id text, message_ids text[]
-- returns: message_id, fingerprint
SELECT message_id, fingerprint FROM {{processed_message}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = ANY(%(message_ids)s::text[])

-- name: find_parked
-- Which duplicates are parked.
-- parameters: subscriber_id text, message_ids text[]
-- returns: message_id, fingerprint
SELECT message_id, fingerprint FROM {{processed_message}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = ANY(%(message_ids)s::text[]) AND dead_letter_id IS NOT NULL

-- name: find_earlier
-- The rows of ids that are duplicates in an older generation.
-- parameters: subscriber_id text, message_ids text[]
-- returns: message_id, dead_letter_id (null if it is not parked)
SELECT message_id, dead_letter_id FROM {{processed_message}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = ANY(%(message_ids)s::text[])

-- name: await_redrives
-- Wait for whoever redrives letters, at most for our lock_timeout, and keep others from it until this transaction ends.
-- A transaction at REPEATABLE READ or SERIALIZABLE fails here (40001) if a letter was redriven after its snapshot.
-- parameters: lock_timeout text, letters bigint[]
-- returns: the numbers of those that are redriven now, or null; the lock_timeout that was
WITH bound AS MATERIALIZED (
  SELECT current_setting('lock_timeout') AS before, set_config('lock_timeout', %(lock_timeout)s, true)
), locked AS MATERIALIZED (
  SELECT letter.dead_letter_id, letter.redriven_at FROM bound, {{dead_letter}} AS letter
  WHERE letter.dead_letter_id = ANY(%(letters)s::bigint[]) AND bound.before IS NOT NULL
  ORDER BY letter.dead_letter_id FOR KEY SHARE OF letter
)
SELECT waited.redriven, set_config('lock_timeout', bound.before, true)
FROM bound, (SELECT array_agg(dead_letter_id) FILTER (WHERE redriven_at IS NOT NULL) AS redriven FROM locked) AS waited

-- name: unrecord
-- Take back what this transaction has recorded, but not what a savepoint in it has: to Postgres that is a transaction
-- of its own.
-- parameters: subscriber_id text, message_ids text[]
-- returns: nothing; the count of rows
DELETE FROM {{processed_message}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = ANY(%(message_ids)s::text[])
  AND xmin = pg_current_xact_id()::xid
