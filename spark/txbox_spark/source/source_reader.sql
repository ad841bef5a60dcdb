-- The tables that format txbox reads, in ranges for several tasks. Ranges are cut at keys of the table: a range includes
-- its first key, and ends before the next one; null is the beginning or the end of the table.

-- name: prepare_read
-- Set up a transaction that reads for as long as Spark takes to consume the rows.
-- parameters: none
-- returns: the settings
SELECT set_config(name, '0', true) FROM pg_settings
WHERE name IN ('statement_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout')
UNION ALL
SELECT set_config('timezone', 'UTC', true)
UNION ALL
SELECT set_config('transaction_read_only', 'on', true)

-- name: size
-- Return the size of a table on disk, with its partitions.
-- parameters: name text
-- returns: bytes
SELECT greatest(
  pg_relation_size(%(name)s::regclass),
  (SELECT coalesce(sum(pg_relation_size(relid)), 0)::bigint FROM pg_partition_tree(%(name)s::regclass))
)

-- name: cut_inbox
-- Return keys that cut the inbox, or a subscriber's part of it, evenly: quantiles of a sample of its blocks.
-- parameters: subscriber_id text (null: all), percent real, parts bigint
-- returns: the key, as text[]
WITH ranked AS (
  SELECT subscriber_id, message_id, row_number() OVER (ORDER BY subscriber_id, message_id) - 1 AS place,
    count(*) OVER () AS rows
  FROM {{processed_message}} TABLESAMPLE SYSTEM (%(percent)s::real)
  WHERE %(subscriber_id)s::text IS NULL OR subscriber_id = %(subscriber_id)s
)
SELECT ARRAY[subscriber_id, message_id] FROM ranked
WHERE place > 0 AND place * %(parts)s::bigint / rows <> (place - 1) * %(parts)s::bigint / rows
ORDER BY subscriber_id, message_id

-- name: read_inbox
-- Return what all subscribers, or one, have processed or parked.
-- parameters: subscriber_id text (null: all), first text[], beyond text[]
-- returns: the columns of SOURCE_TABLES in their order
SELECT subscriber_id, message_id, processed_at, fingerprint, dead_letter_id
FROM {{processed_message}}
WHERE (%(subscriber_id)s::text IS NULL OR subscriber_id = %(subscriber_id)s)
  AND (
    %(first)s::text[] IS NULL
    OR (subscriber_id, message_id) >= ((%(first)s::text[])[1], (%(first)s::text[])[2])
  )
  AND (
    %(beyond)s::text[] IS NULL
    OR (subscriber_id, message_id) < ((%(beyond)s::text[])[1], (%(beyond)s::text[])[2])
  )

-- name: cut_outbox_sent
-- Return ids that cut what was sent evenly.
-- parameters: percent real, parts bigint
-- returns: the key, as text[]
WITH ranked AS (
  SELECT message_id, row_number() OVER (ORDER BY message_id) - 1 AS place, count(*) OVER () AS rows
  FROM {{outbox_sent}} TABLESAMPLE SYSTEM (%(percent)s::real)
)
SELECT DISTINCT ARRAY[message_id] COLLATE "C" AS key FROM ranked
WHERE place > 0 AND place * %(parts)s::bigint / rows <> (place - 1) * %(parts)s::bigint / rows
ORDER BY key

-- name: read_outbox_sent
-- Return what was sent, if a relay keeps it.
-- parameters: first text[], beyond text[]
-- returns: the columns of SOURCE_TABLES in their order
SELECT message_id, position, destination, key, headers::text, body, published_at, sent_at
FROM {{outbox_sent}}
WHERE (%(first)s::text[] IS NULL OR message_id >= (%(first)s::text[])[1])
  AND (%(beyond)s::text[] IS NULL OR message_id < (%(beyond)s::text[])[1])

-- name: cut_letters
-- Return the numbers of dead letters that cut them evenly.
-- parameters: subscriber_id text (null: all), percent real, parts bigint
-- returns: the key, as text[]
WITH ranked AS (
  SELECT dead_letter_id, row_number() OVER (ORDER BY dead_letter_id) - 1 AS place, count(*) OVER () AS rows
  FROM {{dead_letter}} TABLESAMPLE SYSTEM (%(percent)s::real)
  WHERE %(subscriber_id)s::text IS NULL OR subscriber_id = %(subscriber_id)s
)
SELECT ARRAY[dead_letter_id::text] FROM ranked
WHERE place > 0 AND place * %(parts)s::bigint / rows <> (place - 1) * %(parts)s::bigint / rows
ORDER BY dead_letter_id

-- name: read_letters
-- Return the dead letters, including those that were redriven or discarded.
-- parameters: subscriber_id text (null: all), first text[], beyond text[]
-- returns: the columns of SOURCE_TABLES in their order
SELECT dead_letter_id, subscriber_id, message_id, reason, error, attempts, source, headers::text, body, parked_at,
  redriven_at, redriven_by, discarded_at, discarded_by, note
FROM {{dead_letter}}
WHERE (%(subscriber_id)s::text IS NULL OR subscriber_id = %(subscriber_id)s)
  AND (%(first)s::text[] IS NULL OR dead_letter_id >= (%(first)s::text[])[1]::bigint)
  AND (%(beyond)s::text[] IS NULL OR dead_letter_id < (%(beyond)s::text[])[1]::bigint)

-- name: read_loads
-- Return bulk loads and writes with the sums of their chunks. Duplicates are known once a load is finished.
-- parameters: subscriber_id text (null: all)
-- returns: the columns of SOURCE_TABLES in their order
SELECT run.run_id, run.subscriber_id, run.source, run.writer, run.attempts, run.chunks, sums.merged,
  run.rows_read,
  CASE WHEN run.finished_at IS NULL THEN coalesce(run.rows_rejected, 0) + sums.rejected
    ELSE coalesce(run.rows_rejected, sums.rejected) END,
  CASE WHEN run.finished_at IS NOT NULL THEN
    run.rows_read - coalesce(run.rows_rejected, sums.rejected) - sums.already - sums.expired - sums.applied
  END,
  sums.already - sums.parked, sums.parked, sums.expired, sums.applied, run.error, run.started_at, run.heartbeat_at,
  run.finished_at
FROM {{bulk_load}} AS run
CROSS JOIN LATERAL (
  SELECT count(*) AS merged, coalesce(sum(rows_rejected), 0)::bigint AS rejected,
    coalesce(sum(already_processed), 0)::bigint AS already, coalesce(sum(parked), 0)::bigint AS parked,
    coalesce(sum(expired), 0)::bigint AS expired, coalesce(sum(applied), 0)::bigint AS applied
  FROM {{bulk_load_chunk}} AS chunk WHERE chunk.run_id = run.run_id
) AS sums
WHERE %(subscriber_id)s::text IS NULL OR run.subscriber_id = %(subscriber_id)s
