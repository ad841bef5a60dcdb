-- What holds up messages in the outbox.

-- name: held_keys
-- Some of the keys held by a refused message, the next to be tried first.
-- parameters: limit bigint
-- returns: destination, key, message_id, attempts, error, due_seconds (until it is tried again; negative: since)
SELECT destination, key, message_id, attempts, left(error, 20000) AS error,
  extract(epoch FROM due_at - now())::float8 AS due_seconds
FROM {{outbox_message}} WHERE held AND due_at < 'infinity'::timestamptz ORDER BY due_at LIMIT %(limit)s

-- name: kept_rows
-- How many sent messages are kept, by Postgres's statistics.
-- parameters: none
-- returns: rows
SELECT greatest(reltuples, pg_stat_get_live_tuples(oid), 0)::bigint AS rows FROM pg_class WHERE oid = '{{literal(outbox_sent)}}'::regclass
