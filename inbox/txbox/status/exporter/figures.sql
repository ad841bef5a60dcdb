-- Figures for monitoring, read at intervals: each statement looks at a limited number of rows, in limited time.

-- name: bound_time
-- Limit the time of every later statement of this transaction, and of its waits for locks.
-- parameters: statement text, lock text (milliseconds)
-- returns: the settings
SELECT set_config('statement_timeout', %(statement)s, true), set_config('lock_timeout', %(lock)s, true)

-- name: dead_letters
-- The letters that wait, by subscriber: along the index of open letters, so each subscriber is seen.
-- parameters: limit bigint (letters of each subscriber), subscribers bigint
-- returns: subscriber_id, reason, letters, oldest_seconds, exact
WITH RECURSIVE walk AS (
  (SELECT letter.subscriber_id FROM {{dead_letter}} AS letter WHERE {{open}} ORDER BY letter.subscriber_id LIMIT 1)
  UNION ALL
  SELECT next.subscriber_id FROM walk CROSS JOIN LATERAL (
    SELECT letter.subscriber_id FROM {{dead_letter}} AS letter
    WHERE letter.subscriber_id > walk.subscriber_id AND {{open}} ORDER BY letter.subscriber_id LIMIT 1
  ) AS next
), looked_at AS MATERIALIZED (
  SELECT found.* FROM (SELECT subscriber_id FROM walk LIMIT %(subscribers)s) AS one CROSS JOIN LATERAL (
    SELECT letter.subscriber_id, letter.message_id, letter.reason, letter.parked_at, letter.lease_attempts
    FROM {{dead_letter}} AS letter WHERE letter.subscriber_id = one.subscriber_id AND {{open}} LIMIT %(limit)s
  ) AS found
), numbers AS MATERIALIZED (
  SELECT subscriber_id, count(*) < %(limit)s AS exact FROM looked_at GROUP BY subscriber_id
)
SELECT letter.subscriber_id, letter.reason, count(*) AS letters,
  greatest(extract(epoch FROM now() - min(letter.parked_at)), 0)::float8 AS oldest_seconds, bool_and(numbers.exact) AS exact
FROM looked_at AS letter JOIN numbers USING (subscriber_id) WHERE NOT {{processed_since}}
GROUP BY letter.subscriber_id, letter.reason

-- name: retrying
-- Messages that wait for another attempt, by subscriber.
-- parameters: limit bigint (failures in all)
-- returns: subscriber_id, messages, exact
WITH looked_at AS MATERIALIZED (
  SELECT failure.subscriber_id, failure.message_id FROM {{message_failure}} AS failure LIMIT %(limit)s
)
SELECT failure.subscriber_id, count(*) AS messages, (SELECT count(*) FROM looked_at) < %(limit)s AS exact
FROM looked_at AS failure
WHERE NOT {{resent}} GROUP BY failure.subscriber_id

-- name: outbox_held_keys
-- Keys whose first message was refused, by destination: the index of their first messages has one row for each.
-- parameters: limit bigint
-- returns: destination, keys, exact
WITH looked_at AS MATERIALIZED (
  SELECT m.destination FROM {{outbox_message}} AS m WHERE m.held AND m.due_at < 'infinity' LIMIT %(limit)s
)
SELECT destination, count(*) AS keys, (SELECT count(*) FROM looked_at) < %(limit)s AS exact
FROM looked_at GROUP BY destination

-- name: bulk_loads
-- Bulk loads that are not finished, by subscriber; one without a recent sign of life is stalled.
-- parameters: stalled_after interval
-- returns: subscriber_id, running, stalled
SELECT subscriber_id, count(*) FILTER (WHERE error IS NULL AND heartbeat_at >= now() - %(stalled_after)s::interval) AS running,
  count(*) FILTER (WHERE error IS NOT NULL OR heartbeat_at < now() - %(stalled_after)s::interval) AS stalled
FROM {{bulk_load}} AS load WHERE finished_at IS NULL GROUP BY subscriber_id

-- name: pauses
-- Everything that is paused, and for how long.
-- parameters: none
-- returns: kind, name, seconds
SELECT kind, name, greatest(extract(epoch FROM now() - paused_at), 0)::float8 AS seconds FROM {{paused}} AS pause

-- name: received_ages
-- The age of the oldest message in the last batches that workers at work received recently, by subscriber.
-- parameters: stale_after interval, recent interval
-- returns: subscriber_id, seconds
SELECT subscriber_id, greatest(extract(epoch FROM max(last_batch_at - oldest_sent_at)), 0)::float8 AS seconds
FROM {{worker_report}}
WHERE seen_at >= now() - %(stale_after)s::interval AND last_batch_at >= now() - %(recent)s::interval
  AND oldest_sent_at IS NOT NULL
GROUP BY subscriber_id
