-- The inbox: what a subscriber has processed. One insert for each message, in the transaction of its effect.
--
-- record_one and record_many do three things in an order that the data flow forces:
--
--   bound     keeps the transaction's lock_timeout and sets ours;
--   recorded  needs a row of bound, so it inserts under our timeout. Against a row of a transaction that has not ended,
--             ON CONFLICT waits for that transaction: this is the wait that is bounded;
--   SELECT    needs the count of recorded, so it puts the old lock_timeout back last, whatever was inserted.
--
-- set_config(..., true) is local to the transaction, so nothing leaks through a transaction-mode pooler, and a timeout
-- (55P03) aborts the transaction, which undoes the setting as well.

-- name: record_one
-- Record one id. This is the one statement that each message of its own pays.
-- parameters: lock_timeout text, subscriber_id text, message_id text, fingerprint bytea
-- returns: first (1, or 0 for a duplicate), the lock_timeout that was, the server's process id
WITH bound AS MATERIALIZED (
  SELECT current_setting('lock_timeout') AS before, set_config('lock_timeout', %(lock_timeout)s, true)
), recorded AS (
  INSERT INTO {{processed_message}} (subscriber_id, message_id, fingerprint)
  SELECT %(subscriber_id)s::text, %(message_id)s::text, %(fingerprint)s::bytea FROM bound
  ON CONFLICT DO NOTHING
  RETURNING message_id
)
SELECT found.first, set_config('lock_timeout', bound.before, true), pg_backend_pid()
FROM bound, (SELECT count(*) AS first FROM recorded) AS found

-- name: record_many
-- Record many ids, which come sorted.
-- parameters: lock_timeout text, subscriber_id text, message_ids text[], fingerprints bytea[]
-- returns: the ids that are first, or null; the lock_timeout that was, the server's process id
WITH bound AS MATERIALIZED (
  SELECT current_setting('lock_timeout') AS before, set_config('lock_timeout', %(lock_timeout)s, true)
), recorded AS (
  INSERT INTO {{processed_message}} (subscriber_id, message_id, fingerprint)
  SELECT %(subscriber_id)s::text, message.id, message.fingerprint
  FROM bound, unnest(%(message_ids)s::text[], %(fingerprints)s::bytea[]) AS message (id, fingerprint)
  ON CONFLICT DO NOTHING
  RETURNING message_id
)
SELECT found.first, set_config('lock_timeout', bound.before, true), pg_backend_pid()
FROM bound, (SELECT array_agg(message_id) AS first FROM recorded) AS found

-- name: fingerprints
-- The fingerprints of ids that were found to be duplicates.
-- parameters: subscriber_id text, message_ids text[]
-- returns: message_id, fingerprint
SELECT message_id, fingerprint FROM {{processed_message}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = ANY(%(message_ids)s::text[])

-- name: find_parked
-- Which ids that were found to be duplicates are parked.
-- parameters: subscriber_id text, message_ids text[]
-- returns: message_id, fingerprint
SELECT message_id, fingerprint FROM {{processed_message}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = ANY(%(message_ids)s::text[]) AND dead_letter_id IS NOT NULL

-- name: unrecord
-- Take back what this transaction has recorded. Not what a savepoint of it has: for Postgres that is a transaction of
-- its own.
-- parameters: subscriber_id text, message_ids text[]
-- returns: nothing; the count of rows
DELETE FROM {{processed_message}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = ANY(%(message_ids)s::text[])
  AND xmin = pg_current_xact_id()::xid
