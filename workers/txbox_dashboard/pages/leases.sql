-- Leases. The table may have many millions of completed ones, and has no index of those under way. So reads are
-- limited, and begin with what was written last.

-- name: blocks
-- How large the table is.
-- parameters: none
-- returns: blocks, rows (by Postgres's statistics)
SELECT pg_relation_size(oid) / current_setting('block_size')::bigint AS blocks, greatest(reltuples, 0)::bigint AS rows
FROM pg_class WHERE oid = '{{literal(message_lease)}}'::regclass

-- name: counts
-- Each subscriber's leases by state, in a stretch of the table.
-- parameters: first text (a place)
-- returns: subscriber_id, completed, in_flight, run_out, failed, longest_seconds
SELECT subscriber_id,
  count(*) FILTER (WHERE completed_at IS NOT NULL) AS completed,
  count(*) FILTER (WHERE expires_at > clock_timestamp()) AS in_flight,
  count(*) FILTER (WHERE expires_at <= clock_timestamp()) AS run_out,
  count(*) FILTER (WHERE completed_at IS NULL AND expires_at IS NULL) AS failed,
  extract(
    epoch FROM clock_timestamp() - min(least(acquired_at, clock_timestamp())) FILTER (WHERE expires_at IS NOT NULL)
  )::double precision AS longest_seconds
FROM {{message_lease}} WHERE ctid >= %(first)s::text::tid GROUP BY subscriber_id ORDER BY subscriber_id

-- name: under_way
-- The leases that are not completed, in a stretch of the table, the oldest first.
-- parameters: first text (a place), limit bigint
-- returns: subscriber_id, message_id, owner, fence, attempts, failures, held_seconds, expires_seconds (null: it is free)
SELECT subscriber_id, message_id, owner, fence, attempts, failures,
  extract(epoch FROM clock_timestamp() - acquired_at)::float8 AS held_seconds,
  extract(epoch FROM expires_at - clock_timestamp())::float8 AS expires_seconds
FROM {{message_lease}} WHERE ctid >= %(first)s::text::tid AND completed_at IS NULL
ORDER BY acquired_at LIMIT %(limit)s
