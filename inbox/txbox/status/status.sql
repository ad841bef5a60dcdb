-- How the inbox and the dead letters stand; the outbox and the leases have status files of their own.

-- name: inbox_counts
-- Exact figures per subscriber, by reading the whole inbox.
-- parameters: none
-- returns: subscriber_id, messages processed, when the last one was
SELECT subscriber_id, count(*) FILTER (WHERE dead_letter_id IS NULL),
  {{microseconds(max(processed_at) FILTER (WHERE dead_letter_id IS NULL))}}
FROM {{processed_message}} GROUP BY subscriber_id ORDER BY subscriber_id

-- name: failure_counts
-- Messages that wait for another attempt. One that was re-sent and processed since does not.
-- parameters: none
-- returns: subscriber_id, messages
SELECT subscriber_id, count(*) FROM {{message_failure}} AS failure
WHERE NOT EXISTS (
  SELECT FROM {{processed_message}} AS processed
  WHERE processed.subscriber_id = failure.subscriber_id AND processed.message_id = failure.message_id
)
GROUP BY subscriber_id ORDER BY subscriber_id

-- name: conflicts
-- Deadlocks and serialization failures of handlers, the latest first.
-- parameters: most int
-- returns: subscriber_id, sqlstate, relation, conflicts, first_at, last_at
SELECT subscriber_id, sqlstate, place AS relation, conflicts, {{microseconds(first_at)}} AS first_at,
  {{microseconds(last_at)}} AS last_at
FROM {{handler_conflict}} AS conflict ORDER BY conflict.last_at DESC, subscriber_id, sqlstate, place LIMIT %(most)s

-- name: letter_counts
-- Dead letters that wait for a person.
-- parameters: none
-- returns: subscriber_id, reason, letters, since when the oldest waits
SELECT subscriber_id, reason, count(*), {{microseconds(min(parked_at))}} FROM {{dead_letter}} WHERE redriven_at IS NULL
GROUP BY subscriber_id, reason ORDER BY subscriber_id, reason
