-- All that is known of one message id. Every table is read by its key, subscriber by subscriber.

-- name: published
-- The message in the outbox, which has no index of ids.
-- parameters: message_id text
-- returns: destination, key, attempts, error, held, published_at, due_at
SELECT destination, key, attempts, left(error, 20000) AS error, held, {{microseconds(published_at)}} AS published_at,
  {{microseconds(due_at)}} AS due_at
FROM {{outbox_message}} AS waiting WHERE message_id = %(message_id)s LIMIT 20

-- name: outbox_rows
-- How many messages wait in the outbox, by Postgres's statistics.
-- parameters: none
-- returns: rows
SELECT greatest(pg_stat_get_live_tuples(oid), reltuples, 0)::bigint AS rows FROM pg_class
WHERE oid = '{{literal(outbox_message)}}'::regclass

-- name: sent
-- When it was sent, if relays keep that.
-- parameters: message_id text
-- returns: destination, key, sent_at
SELECT destination, key, {{microseconds(sent_at)}} AS sent_at FROM {{outbox_sent}} AS gone
WHERE message_id = %(message_id)s ORDER BY gone.sent_at LIMIT 20

-- name: recorded
-- Which subscribers have it in their inboxes.
-- parameters: message_id text, subscriber_ids text[]
-- returns: subscriber_id, processed_at, dead_letter_id
SELECT found.subscriber_id, {{microseconds(found.processed_at)}} AS processed_at, found.dead_letter_id
FROM unnest(%(subscriber_ids)s::text[]) AS wanted (subscriber_id) CROSS JOIN LATERAL (
  SELECT * FROM {{processed_message}} AS recorded
  WHERE recorded.subscriber_id = wanted.subscriber_id AND recorded.message_id = %(message_id)s
) AS found

-- name: loading
-- The bulk loads of a subscriber that ran at a moment.
-- parameters: subscriber_id text, moment timestamptz
-- returns: run_id, source
SELECT run_id, source FROM {{bulk_load}} WHERE subscriber_id = %(subscriber_id)s AND started_at <= %(moment)s::timestamptz
  AND coalesce(finished_at, heartbeat_at + interval '1 minute') >= %(moment)s::timestamptz LIMIT 5

-- name: failed
-- Its failures that wait for another attempt.
-- parameters: message_id text, subscriber_ids text[]
-- returns: subscriber_id, attempts, error, first_failed_at, last_failed_at, history
SELECT found.subscriber_id, found.attempts, found.error, {{microseconds(found.first_failed_at)}} AS first_failed_at,
  {{microseconds(found.last_failed_at)}} AS last_failed_at, found.history
FROM unnest(%(subscriber_ids)s::text[]) AS wanted (subscriber_id) CROSS JOIN LATERAL (
  SELECT * FROM {{message_failure}} AS failure
  WHERE failure.subscriber_id = wanted.subscriber_id AND failure.message_id = %(message_id)s
) AS found

-- name: letters
-- Its dead letters, the last first.
-- parameters: message_id text, subscriber_ids text[]
-- returns: dead_letter_id, subscriber_id, reason, error, attempts, parked_at, redriven_at, redriven_by, discarded_at,
--   discarded_by, history, order_key
SELECT found.dead_letter_id, found.subscriber_id, found.reason, left(found.error, 20000) AS error, found.attempts,
  {{microseconds(found.parked_at)}} AS parked_at, {{microseconds(found.redriven_at)}} AS redriven_at, found.redriven_by,
  {{microseconds(found.discarded_at)}} AS discarded_at, found.discarded_by, found.history,
  found.order_key
FROM unnest(%(subscriber_ids)s::text[]) AS wanted (subscriber_id) CROSS JOIN LATERAL (
  SELECT * FROM {{dead_letter}} AS letter
  WHERE letter.subscriber_id = wanted.subscriber_id AND letter.message_id = %(message_id)s
  ORDER BY letter.dead_letter_id DESC LIMIT 20
) AS found ORDER BY found.dead_letter_id DESC

-- name: leased
-- Its leases.
-- parameters: message_id text, subscriber_ids text[]
-- returns: subscriber_id, owner, fence, attempts, acquired_at, expires_at, completed_at, expired
SELECT found.subscriber_id, found.owner, found.fence, found.attempts, {{microseconds(found.acquired_at)}} AS acquired_at,
  {{microseconds(found.expires_at)}} AS expires_at, {{microseconds(found.completed_at)}} AS completed_at,
  coalesce(found.expires_at <= clock_timestamp(), false) AS expired
FROM unnest(%(subscriber_ids)s::text[]) AS wanted (subscriber_id) CROSS JOIN LATERAL (
  SELECT * FROM {{message_lease}} AS lease
  WHERE lease.subscriber_id = wanted.subscriber_id AND lease.message_id = %(message_id)s
) AS found

-- name: horizons
-- The horizons of all subscribers.
-- parameters: none
-- returns: subscriber_id, horizon
SELECT subscriber_id, {{microseconds(horizon)}} AS horizon FROM {{inbox_horizon}} AS forgetting ORDER BY subscriber_id
