-- What the inbox recorded lately. It has no index on the time, but its newest rows are mostly at its end: only that is
-- read, a number of blocks. Times are in seconds since 1970.

-- name: parts
-- The generations of a rotating inbox, the newest first, or the one table. Also takes what the fragment this_stretch does.
-- parameters: none
-- returns: generation, opened_at (both null: the one table), blocks, newest (when the newest stretch began)
SELECT generation.generation, extract(epoch FROM generation.opened_at)::float8 AS opened_at,
  coalesce(pg_relation_size(part.oid), 0) / current_setting('block_size')::bigint AS blocks,
  extract(epoch FROM {{this_stretch}})::bigint AS newest
FROM pg_class AS inbox LEFT JOIN pg_inherits ON inhparent = inbox.oid
JOIN pg_class AS part ON part.oid = coalesce(inhrelid, inbox.oid)
LEFT JOIN {{inbox_generation}} AS generation ON part.relname = inbox.relname || '_g' || generation.generation
WHERE inbox.oid = '{{literal(processed_message)}}'::regclass
ORDER BY generation.generation DESC

-- fragment: begin
date_bin(make_interval(secs => %(seconds)s::int), processed_at, 'epoch')

-- fragment: counts
SELECT subscriber_id, extract(epoch FROM {{begin}})::bigint AS begins_at, count(*) AS count,
  count(*) FILTER (WHERE processed_at > now() - interval '1 minute') AS last_minute

-- OFFSET keeps the planner from looking for subscribers in the key: that reads them from the beginning.
-- fragment: lately
ctid >= %(first)s::text::tid AND processed_at >= to_timestamp(%(since)s::bigint) AND dead_letter_id IS NULL OFFSET 0
) AS lately WHERE subscriber_id = ANY(%(subscriber_ids)s::text[]) GROUP BY subscriber_id, {{begin}}

-- name: recorded
-- How many messages subscribers have processed in each stretch of time, by the end of the inbox.
-- parameters: seconds int, first text (a place), since bigint, subscriber_ids text[]
-- returns: subscriber_id, begins_at, count, last_minute (of them, in the last minute)
{{counts}} FROM (SELECT subscriber_id, processed_at FROM {{processed_message}} WHERE {{lately}}

-- name: recorded_in_generation
-- The same by the end of one generation. By the partitioned table: a role that may read that may not read its parts.
-- parameters: seconds int, generation int, first text (a place), since bigint, subscriber_ids text[]
-- returns: as recorded
{{counts}} FROM (SELECT subscriber_id, processed_at FROM {{processed_message}}
  WHERE generation = %(generation)s::int AND {{lately}}
