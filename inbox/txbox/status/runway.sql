-- What is forgotten, and how far that has got.

-- name: tasks
-- What maintainers have done; the row of task lease says who works.
-- parameters: none
-- returns: task, owner, at_work, finished_at, seconds_ago (null: it never finished), removed, detail
SELECT task, owner, coalesce(expires_at > clock_timestamp(), false) AS at_work,
  {{microseconds(finished_at)}} AS finished_at,
  greatest(extract(epoch FROM clock_timestamp() - finished_at), 0)::double precision AS seconds_ago, removed, detail
FROM {{maintenance}} AS task ORDER BY task

-- name: horizons
-- The horizon of each subscriber that forgets.
-- parameters: none
-- returns: subscriber_id, horizon, age_seconds
SELECT subscriber_id, {{microseconds(horizon)}} AS horizon,
  extract(epoch FROM clock_timestamp() - horizon)::double precision AS age_seconds
FROM {{inbox_horizon}} ORDER BY subscriber_id

-- name: archives
-- How far each archive is.
-- parameters: none
-- returns: location, archived_upto (null: nothing is in it), archived_at, behind_seconds
SELECT location, {{microseconds(archived_upto)}} AS archived_upto, {{microseconds(archived_at)}} AS archived_at,
  extract(epoch FROM clock_timestamp() - archived_upto)::double precision AS behind_seconds
FROM {{archive}} AS lake ORDER BY location

-- name: inbox_size
-- Size of the inbox with its index, as one table or in generations.
-- parameters: none
-- returns: bytes, partitioned
SELECT coalesce((SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree(inbox.oid))::bigint,
    pg_total_relation_size(inbox.oid)) AS bytes,
  relkind = 'p' AS partitioned
FROM pg_class AS inbox WHERE oid = '{{literal(processed_message)}}'::regclass

-- name: generations
-- The generations of a rotating inbox, the oldest first; rows are the planner's estimate.
-- parameters: none
-- returns: generation, opened_at, closed_at (null: it is the current one), rows, bytes, age_seconds
SELECT one.generation, {{microseconds(one.opened_at)}} AS opened_at, {{microseconds(one.closed_at)}} AS closed_at,
  greatest(part.reltuples, 0)::bigint AS rows, pg_total_relation_size(part.oid) AS bytes,
  extract(epoch FROM clock_timestamp() - one.opened_at)::double precision AS age_seconds
FROM {{inbox_generation}} AS one
JOIN pg_class AS inbox ON inbox.oid = '{{literal(processed_message)}}'::regclass
JOIN pg_inherits ON inhparent = inbox.oid
JOIN pg_class AS part ON part.oid = inhrelid AND part.relname = inbox.relname || '_g' || one.generation
ORDER BY one.generation

-- name: oldest_kept
-- The oldest ids in a stretch of blocks, by subscriber.
-- parameters: first text (a place), beyond text (a place)
-- returns: subscriber_id, oldest
SELECT subscriber_id, {{microseconds(min(processed_at))}} AS oldest FROM {{processed_message}}
WHERE ctid >= %(first)s::text::tid AND ctid < %(beyond)s::text::tid GROUP BY subscriber_id

-- name: waits_for
-- The sessions of those transactions that are still running.
-- parameters: virtualxids text[]
-- returns: pid
SELECT DISTINCT pid FROM pg_locks
WHERE locktype = 'virtualxid' AND mode = 'ExclusiveLock' AND virtualxid = ANY(%(virtualxids)s::text[]) AND pid IS NOT NULL
ORDER BY pid
