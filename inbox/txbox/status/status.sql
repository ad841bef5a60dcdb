-- The state of the inbox; dead letters, the outbox and the leases have their own files.

-- fragment: resent
-- Whether a failed message was sent again and processed since, so that it does not wait for another attempt.
EXISTS (
    SELECT FROM {{processed_message}} AS processed
    WHERE processed.subscriber_id = failure.subscriber_id AND processed.message_id = failure.message_id
  )

-- name: inbox_counts
-- Exact figures per subscriber, by reading the whole inbox.
-- parameters: none
-- returns: subscriber_id, messages processed, when the last one was
SELECT subscriber_id, count(*) FILTER (WHERE dead_letter_id IS NULL),
  {{microseconds(max(processed_at) FILTER (WHERE dead_letter_id IS NULL))}}
FROM {{processed_message}} GROUP BY subscriber_id ORDER BY subscriber_id

-- name: failure_counts
-- Messages that wait for another attempt.
-- parameters: none
-- returns: subscriber_id, messages
SELECT subscriber_id, count(*) FROM {{message_failure}} AS failure
WHERE NOT {{resent}} GROUP BY subscriber_id ORDER BY subscriber_id

-- name: conflicts
-- Deadlocks and serialization failures of handlers, the latest first.
-- parameters: subscriber_id text (null: all), most int
-- returns: the columns of HandlerConflict
SELECT subscriber_id, sqlstate, relation, conflicts, {{microseconds(first_at)}} AS first_at,
  {{microseconds(last_at)}} AS last_at
FROM {{handler_conflict}} AS conflict
WHERE %(subscriber_id)s::text IS NULL OR subscriber_id = %(subscriber_id)s::text
ORDER BY conflict.last_at DESC, subscriber_id, sqlstate, relation LIMIT %(most)s
