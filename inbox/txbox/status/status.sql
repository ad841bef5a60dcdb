-- How the inbox stands; dead letters, the outbox and the leases have files of their own.

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
SELECT subscriber_id, sqlstate, relation, conflicts, {{microseconds(first_at)}} AS first_at,
  {{microseconds(last_at)}} AS last_at
FROM {{handler_conflict}} AS conflict ORDER BY conflict.last_at DESC, subscriber_id, sqlstate, relation LIMIT %(most)s
