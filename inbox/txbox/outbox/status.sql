-- The state of the outbox, for operators. What may meet millions of rows has a limit, and runs with a time-out.

-- fragment: looked_at
m.destination, m.due_at, m.held, m.attempts, left(m.error, 20000) AS error, m.published_at

-- A message was refused, or is behind a refused one; or is not due yet; or else is to be sent now. When a delayed
-- message is due, a relay at work removes its time, so due_at is set only until a relay has seen it.
-- fragment: counted
kinds AS (
  SELECT destination, attempts, held OR attempts > 0 AS failed,
    NOT held AND attempts = 0 AND coalesce(due_at > now(), false) AS delayed,
    CASE WHEN held OR attempts > 0 THEN published_at ELSE greatest(published_at, due_at) END AS since
  FROM looked_at
), worst AS (
  SELECT DISTINCT ON (destination) destination, error
  FROM looked_at WHERE attempts > 0 ORDER BY destination, attempts DESC
)
SELECT destination, count(*) FILTER (WHERE NOT failed AND NOT delayed) AS waiting,
  count(*) FILTER (WHERE delayed) AS delayed, count(*) FILTER (WHERE failed) AS retrying,
  extract(epoch FROM now() - min(least(since, now())) FILTER (WHERE NOT delayed AND isfinite(since)))::float8
    AS oldest_seconds,
  max(attempts) AS most_attempts, (SELECT error FROM worst WHERE worst.destination = kinds.destination) AS error
FROM kinds GROUP BY destination ORDER BY destination

-- A session ends at once when its process is killed; a standby does not show the sessions of its primary.
-- fragment: stale
(
    seen_at < now() - %(stale_after)s::interval
    OR NOT pg_is_in_recovery() AND reported.backend_pid IS NOT NULL
      AND NOT EXISTS (SELECT FROM pg_stat_activity AS session WHERE session.pid = reported.backend_pid)
  )

-- name: bound_time
-- Bound the time of every later statement of this transaction.
-- parameters: milliseconds text
-- returns: the setting
SELECT set_config('statement_timeout', %(milliseconds)s, true)

-- name: plan_by_index
-- Make later statements of this transaction jump along an index, whatever the statistics of a queue say.
-- parameters: none
-- returns: the settings
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true)

-- name: backlog
-- The messages of each destination.
-- parameters: limit bigint (how many to look at in all)
-- returns: destination, waiting, delayed, retrying, oldest_seconds, most_attempts, error
WITH looked_at AS MATERIALIZED (SELECT {{looked_at}} FROM {{outbox_message}} AS m LIMIT %(limit)s), {{counted}}

-- name: backlog_by_lane
-- The first messages of each lane, if there are too many to look at them all: this sees every destination, and its
-- oldest message.
-- parameters: lanes bigint (at most), limit bigint (messages in all)
-- returns: as backlog
WITH RECURSIVE walk AS (
  (SELECT lane FROM {{outbox_message}} ORDER BY lane, position LIMIT 1)
  UNION ALL
  SELECT next.lane FROM walk CROSS JOIN LATERAL (
    SELECT m.lane FROM {{outbox_message}} AS m WHERE m.lane > walk.lane ORDER BY m.lane, m.position LIMIT 1
  ) AS next
), lanes AS MATERIALIZED (
  SELECT lane FROM walk LIMIT %(lanes)s
), share AS MATERIALIZED (
  SELECT greatest(%(limit)s / greatest(count(*), 1), 1) AS rows FROM lanes
), looked_at AS MATERIALIZED (
  SELECT m.* FROM share CROSS JOIN lanes CROSS JOIN LATERAL (
    SELECT {{looked_at}} FROM {{outbox_message}} AS m WHERE m.lane = lanes.lane ORDER BY m.position LIMIT share.rows
  ) AS m
), {{counted}}

-- name: backlog_of
-- The messages of one destination, by its lanes.
-- parameters: low bigint, high bigint (its lanes), limit bigint (how many to look at)
-- returns: waiting, delayed (also those that were refused, and those behind them)
SELECT count(*) FILTER (WHERE due_at IS NULL) AS waiting, count(due_at) AS delayed
FROM (SELECT due_at FROM {{outbox_message}} WHERE lane BETWEEN %(low)s AND %(high)s LIMIT %(limit)s) AS bounded

-- name: estimate_of
-- The planner's estimate of how many messages one destination has. It reads none of them.
-- parameters: low bigint, high bigint (its lanes)
-- returns: the plan, with its rows
EXPLAIN (FORMAT JSON) SELECT FROM {{outbox_message}} WHERE lane BETWEEN %(low)s AND %(high)s

-- name: row_estimates
-- Postgres's estimates of a table's rows: how many there are, and how many were removed but not cleaned up.
-- parameters: name text (quoted)
-- returns: live, dead
SELECT CASE WHEN pg_stat_get_live_tuples(oid) > 0 THEN pg_stat_get_live_tuples(oid)
  ELSE greatest(reltuples, 0)::bigint END AS live, pg_stat_get_dead_tuples(oid) AS dead
FROM pg_class WHERE oid = %(name)s::regclass

-- name: relays
-- The relays whose rows are not deleted; a stale one has no session, or has not reported for too long. After its first
-- report, a relay has no rate.
-- parameters: stale_after interval
-- returns: the columns of RelayStatus
SELECT relay_id, host, pid, sent, failed, CASE WHEN seen_at > started_at THEN sent_per_second END AS sent_per_second,
  {{microseconds(started_at)}} AS started_at,
  greatest(extract(epoch FROM now() - seen_at), 0)::float8 AS seen_seconds_ago, outages, {{stale}} AS stale,
  version, state, destinations
FROM {{outbox_relay}} AS reported ORDER BY host, pid, relay_id

-- name: relays_at_work
-- How many relays are not stale.
-- parameters: stale_after interval
-- returns: count
SELECT count(*) FROM {{outbox_relay}} AS reported WHERE NOT {{stale}}

-- name: kept
-- How many sent messages are kept, and since when.
-- parameters: limit bigint
-- returns: messages (at most so many), since
SELECT (SELECT count(*) FROM (SELECT FROM {{outbox_sent}} LIMIT %(limit)s) AS bounded) AS messages,
  (SELECT {{microseconds(min(sent_at))}} FROM {{outbox_sent}}) AS since
