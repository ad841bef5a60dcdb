-- Dead letters: parked messages, whole. A parked message has a row in the inbox too, which names its letter.

-- fragment: letter
dead_letter_id, subscriber_id, message_id, reason, error, attempts, source, body, headers, envelope,
  {{microseconds(parked_at)}} AS parked_at, {{microseconds(redriven_at)}} AS redriven_at, history

-- name: park
-- Park a dead letter, once.
-- parameters: subscriber_id text, message_id text, reason text, error text, attempts int, source text, body bytea,
--   body_hash bytea, headers jsonb, envelope jsonb, history jsonb, lease_attempts int
-- returns: dead_letter_id, also when it was parked before
INSERT INTO {{dead_letter}} AS parked (
  subscriber_id, message_id, reason, error, attempts, source, body, body_hash, headers, envelope, history,
  lease_attempts
)
VALUES (%(subscriber_id)s, %(message_id)s, %(reason)s, %(error)s, %(attempts)s, %(source)s, %(body)s, %(body_hash)s,
  %(headers)s::jsonb, %(envelope)s::jsonb, %(history)s::jsonb, %(lease_attempts)s)
ON CONFLICT (subscriber_id, message_id, body_hash) WHERE redriven_at IS NULL
DO UPDATE SET error = excluded.error
RETURNING dead_letter_id

-- name: mark_parked
-- Record in the inbox that a message is parked. It waits for a transaction that processes the message.
-- parameters: subscriber_id text, message_id text, fingerprint bytea, dead_letter_id bigint
-- returns: nothing; the count of rows is 0 if the inbox has the message
INSERT INTO {{processed_message}} (subscriber_id, message_id, fingerprint, dead_letter_id)
VALUES (%(subscriber_id)s, %(message_id)s, %(fingerprint)s, %(dead_letter_id)s)
ON CONFLICT DO NOTHING

-- name: find_recorded
-- Read the row of a message in the inbox.
-- parameters: subscriber_id text, message_id text
-- returns: fingerprint, dead_letter_id (null if it is not parked)
SELECT fingerprint, dead_letter_id FROM {{processed_message}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = %(message_id)s

-- name: unmark_parked
-- Delete the row in the inbox that says a message is parked, as it is sent through again.
-- parameters: subscriber_id text, message_id text
-- returns: nothing
DELETE FROM {{processed_message}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = %(message_id)s AND dead_letter_id IS NOT NULL

-- name: mark_others_mismatch
-- Mark the other letters of a message as mismatches, as another body of it is processed.
-- parameters: subscriber_id text, message_id text, dead_letter_id bigint (of the body that is processed)
-- returns: nothing
UPDATE {{dead_letter}} SET reason = 'mismatch'
WHERE subscriber_id = %(subscriber_id)s AND message_id = %(message_id)s AND dead_letter_id <> %(dead_letter_id)s
  AND redriven_at IS NULL

-- name: waits_parked
-- Whether a message of a ledger waits as a dead letter.
--
-- One that is locked is being redriven, so it waits no more: its copy may be the very delivery that asks.
--
--   redrive   locks the letter, sends ------------------------- redriven_at = now(), commits
--   worker             receives the copy, fails, asks: parked? With "yes" it would ack the only copy.
--
-- parameters: lease_attempts int (its attempts in the ledger), subscriber_id text, message_id text, body_hash bytea
-- returns: nothing; the count of rows is 1 if it waits
UPDATE {{dead_letter}} AS letter SET lease_attempts = greatest(letter.lease_attempts, %(lease_attempts)s)
WHERE letter.dead_letter_id = (
  SELECT waiting.dead_letter_id FROM {{dead_letter}} AS waiting
  WHERE waiting.subscriber_id = %(subscriber_id)s AND waiting.message_id = %(message_id)s
    AND waiting.body_hash = %(body_hash)s AND waiting.redriven_at IS NULL
  FOR UPDATE SKIP LOCKED
)

-- name: lease_attempts
-- How many attempts a message had in its ledger when it was parked last, also by a letter that is being redriven.
-- parameters: subscriber_id text, message_id text
-- returns: attempts, or null
SELECT max(lease_attempts) FROM {{dead_letter}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = %(message_id)s

-- name: letters
-- A page of dead letters.
-- parameters: subscriber_id text (or null for all), with_redriven boolean, after bigint, page bigint
-- returns: letters
SELECT {{letter}} FROM {{dead_letter}}
WHERE (%(subscriber_id)s::text IS NULL OR subscriber_id = %(subscriber_id)s)
  AND (%(with_redriven)s OR redriven_at IS NULL) AND dead_letter_id > %(after)s
ORDER BY dead_letter_id LIMIT %(page)s

-- name: letter_of
-- One dead letter.
-- parameters: dead_letter_id bigint
-- returns: a letter
SELECT {{letter}} FROM {{dead_letter}} WHERE dead_letter_id = %(dead_letter_id)s

-- name: lock_letters
-- A dead letter and those that wait under the same id, locked until the transaction ends. So two redrives do not both
-- send it, and do not wait for each other in a circle.
-- parameters: dead_letter_id bigint
-- returns: letters
SELECT {{letter}} FROM {{dead_letter}}
WHERE dead_letter_id = ANY(ARRAY(
  SELECT waiting.dead_letter_id
  FROM {{dead_letter}} AS waiting JOIN {{dead_letter}} AS this USING (subscriber_id, message_id)
  WHERE this.dead_letter_id = %(dead_letter_id)s AND waiting.redriven_at IS NULL
) || %(dead_letter_id)s::bigint)
ORDER BY dead_letter_id FOR UPDATE

-- name: mark_redriven
-- Mark a dead letter as sent through again.
-- parameters: dead_letter_id bigint
-- returns: nothing
UPDATE {{dead_letter}} SET redriven_at = now() WHERE dead_letter_id = %(dead_letter_id)s
