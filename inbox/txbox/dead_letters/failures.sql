-- Failed attempts: a row for each message that has failed, with its last attempts, newest first.

-- fragment: one_more
ON CONFLICT (subscriber_id, message_id) DO UPDATE
SET attempts = failure.attempts + 1, error = excluded.error, last_failed_at = now(), history = excluded.history ||
  CASE WHEN jsonb_array_length(failure.history) < {{max_history}} THEN failure.history ELSE failure.history - -1 END
RETURNING attempts, history

-- name: begin_attempt
-- Count an attempt before it is made.
-- parameters: subscriber_id text, message_id text, error text, attempt jsonb
-- returns: attempts, history, the age in seconds of the attempt before; no row if the message is processed or parked
INSERT INTO {{message_failure}} AS failure (subscriber_id, message_id, attempts, error, history)
SELECT candidate.subscriber_id, candidate.message_id, 1, candidate.error, candidate.history
FROM (
  SELECT %(subscriber_id)s::text, %(message_id)s::text, %(error)s::text,
    jsonb_build_array(jsonb_build_object('at', now()) || %(attempt)s::jsonb)
) AS candidate (subscriber_id, message_id, error, history)
WHERE NOT EXISTS (
  SELECT FROM {{processed_message}} AS processed
  WHERE processed.subscriber_id = candidate.subscriber_id AND processed.message_id = candidate.message_id
)
{{one_more}}, extract(epoch FROM now() - (history -> 1 ->> 'at')::timestamptz)::double precision

-- name: count_failure
-- Count an attempt that has failed.
-- parameters: subscriber_id text, message_id text, error text, attempt jsonb
-- returns: attempts, history
INSERT INTO {{message_failure}} AS failure (subscriber_id, message_id, attempts, error, history)
VALUES (%(subscriber_id)s, %(message_id)s, 1, %(error)s,
  jsonb_build_array(jsonb_build_object('at', now()) || %(attempt)s::jsonb))
{{one_more}}

-- name: lock_failure
-- The attempts of a message, locked.
-- parameters: subscriber_id text, message_id text
-- returns: attempts, error, history
SELECT attempts, error, history FROM {{message_failure}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = %(message_id)s FOR UPDATE

-- name: write_failure
-- Write the attempts of a locked message.
-- parameters: attempts int, error text, history jsonb, subscriber_id text, message_id text
-- returns: nothing
UPDATE {{message_failure}}
SET attempts = %(attempts)s, error = %(error)s, history = %(history)s::jsonb, last_failed_at = now()
WHERE subscriber_id = %(subscriber_id)s AND message_id = %(message_id)s

-- name: attempts
-- How often a message was tried so far.
-- parameters: subscriber_id text, message_id text
-- returns: attempts, history; no row if it was not tried
SELECT attempts, history FROM {{message_failure}} WHERE subscriber_id = %(subscriber_id)s AND message_id = %(message_id)s

-- name: forget_failures
-- Forget the failures of messages that have succeeded or are parked.
-- parameters: subscriber_id text, message_ids text[]
-- returns: nothing
DELETE FROM {{message_failure}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = ANY(%(message_ids)s::text[])
