-- Dead letters: whole parked messages. A parked message also has a row in the inbox, which names its letter.
--
-- A letter is open until it is redriven or discarded. An open letter waits for a person, unless its message was
-- processed since. A discarded one still refuses copies of its message: its row in the inbox stays.

-- fragment: open
letter.redriven_at IS NULL AND letter.discarded_at IS NULL

-- fragment: processed_since
-- If the inbox has a row, it decides; otherwise the ledger does, for letters of a ledger. That happens if:
--   the row of a parked message was deleted by hand, and a copy of the message came;
--   a version without the row in the inbox processed the message before it was parked;
--   the redrive of a ledger's letter sent it and died before its commit, and the copy was completed.
-- A mismatch has another body than the one that was processed, so it waits.
(letter.reason <> 'mismatch' AND coalesce(
  (SELECT bool_and(processed.dead_letter_id IS NULL) FROM {{processed_message}} AS processed
    WHERE processed.subscriber_id = letter.subscriber_id AND processed.message_id = letter.message_id),
  (SELECT lease.completed_at IS NOT NULL FROM {{message_lease}} AS lease
    WHERE lease.subscriber_id = letter.subscriber_id AND lease.message_id = letter.message_id
      AND letter.lease_attempts IS NOT NULL),
  false))

-- fragment: waits
{{open}} AND NOT {{processed_since}}

-- fragment: letter
-- Of its body, body_bytes bytes after the first body_from, or all of it. The body's size is known without reading it.
letter.dead_letter_id, letter.subscriber_id, letter.message_id, letter.reason, letter.error, letter.attempts,
  letter.source, CASE WHEN %(body_bytes)s::int IS NULL THEN letter.body
    ELSE substring(letter.body FROM %(body_from)s::int + 1 FOR %(body_bytes)s::int) END AS body,
  octet_length(letter.body) AS body_size, letter.headers, letter.envelope, {{microseconds(letter.parked_at)}} AS parked_at,
  {{microseconds(letter.redriven_at)}} AS redriven_at, letter.redriven_by,
  {{microseconds(letter.discarded_at)}} AS discarded_at, letter.discarded_by, letter.note, letter.history,
  letter.order_key, letter.order_position, {{open}} AND {{processed_since}} AS processed_since

-- name: park
-- Park a dead letter, once.
-- parameters: subscriber_id text, message_id text, reason text, error text, attempts int, source text, body bytea,
--   body_hash bytea, headers jsonb, envelope jsonb, history jsonb, lease_attempts int,
--   order_key text
-- returns: dead_letter_id, also when it was parked before
INSERT INTO {{dead_letter}} AS parked (
  subscriber_id, message_id, reason, error, attempts, source, body, body_hash, headers, envelope, history,
  lease_attempts, order_key
)
VALUES (%(subscriber_id)s, %(message_id)s, %(reason)s, %(error)s, %(attempts)s, %(source)s, %(body)s, %(body_hash)s,
  %(headers)s::jsonb, %(envelope)s::jsonb, %(history)s::jsonb, %(lease_attempts)s, %(order_key)s)
ON CONFLICT (subscriber_id, message_id, body_hash) WHERE redriven_at IS NULL AND discarded_at IS NULL
DO UPDATE SET error = excluded.error, order_key = coalesce(parked.order_key, excluded.order_key)
RETURNING dead_letter_id

-- name: mark_parked
-- Record in the inbox that a message is parked. This waits for a transaction that processes the message, but not for
-- one that redrives it if its row is in an older generation: await_redrive does. It runs at READ COMMITTED, so its
-- snapshot is never older than a rotation (see inbox.sql).
-- parameters: subscriber_id text, message_id text, fingerprint bytea, dead_letter_id bigint
-- returns: nothing; the count of rows is 0 if the inbox has the message
INSERT INTO {{processed_message}} (subscriber_id, message_id, fingerprint, dead_letter_id)
SELECT %(subscriber_id)s::text, %(message_id)s::text, %(fingerprint)s::bytea, %(dead_letter_id)s::bigint
WHERE NOT EXISTS (
  SELECT FROM {{processed_earlier}} AS earlier
  WHERE earlier.subscriber_id = %(subscriber_id)s::text AND earlier.message_id = %(message_id)s::text
)
ON CONFLICT DO NOTHING

-- name: mark_expired
-- Mark a letter as expired if this transaction has parked it: a letter that waited before was judged then.
-- parameters: error text, dead_letter_id bigint
-- returns: nothing
UPDATE {{dead_letter}} SET reason = 'expired', error = %(error)s
WHERE dead_letter_id = %(dead_letter_id)s AND parked_at = now()

-- name: find_recorded
-- Return a message's row in the inbox.
-- parameters: subscriber_id text, message_id text
-- returns: fingerprint, dead_letter_id (null if it is not parked)
SELECT fingerprint, dead_letter_id FROM {{processed_message}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = %(message_id)s

-- name: await_redrive
-- Wait for whoever redrives a letter, and keep others from redriving it until this transaction ends.
-- parameters: dead_letter_id bigint
-- returns: nothing of interest
SELECT FROM {{dead_letter}} WHERE dead_letter_id = %(dead_letter_id)s FOR KEY SHARE

-- name: unmark_parked
-- Delete the row in the inbox that says a message is parked, because it is sent through again.
-- parameters: subscriber_id text, message_id text
-- returns: nothing
DELETE FROM {{processed_message}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = %(message_id)s AND dead_letter_id IS NOT NULL

-- name: mark_others_mismatch
-- Mark a message's other letters as mismatches, because another body of it is processed. They hold no key.
-- parameters: subscriber_id text, message_id text, dead_letter_id bigint (of the body that is processed)
-- returns: nothing
UPDATE {{dead_letter}} AS letter SET reason = 'mismatch', order_position = NULL
WHERE letter.subscriber_id = %(subscriber_id)s AND letter.message_id = %(message_id)s
  AND letter.dead_letter_id <> %(dead_letter_id)s AND {{open}}

-- name: waits_parked
-- Whether a message of a ledger is parked, or was discarded: its last letter was not redriven.
--
-- A letter that is locked is being redriven, so it no longer waits: its copy may be the very delivery that asks.
--
--   redrive   locks the letter, sends ------------------------- redriven_at = now(), commits
--   worker             receives the copy, fails, asks: parked? With "yes" it would ack the only copy.
--
-- parameters: lease_attempts int (its attempts in the ledger), subscriber_id text, message_id text, body_hash bytea
-- returns: nothing; the count of rows is 1 if it is
UPDATE {{dead_letter}} AS letter SET lease_attempts = greatest(letter.lease_attempts, %(lease_attempts)s)
WHERE letter.dead_letter_id = (
  SELECT parked.dead_letter_id FROM {{dead_letter}} AS parked
  WHERE parked.redriven_at IS NULL AND parked.dead_letter_id = (
    SELECT max(any_of_it.dead_letter_id) FROM {{dead_letter}} AS any_of_it
    WHERE any_of_it.subscriber_id = %(subscriber_id)s AND any_of_it.message_id = %(message_id)s
      AND any_of_it.body_hash = %(body_hash)s
  )
  FOR UPDATE SKIP LOCKED
)

-- name: lease_attempts
-- How many attempts a message had in its ledger when it was last parked; a letter that is being redriven counts, too.
-- parameters: subscriber_id text, message_id text
-- returns: attempts, or null
SELECT max(lease_attempts) FROM {{dead_letter}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = %(message_id)s

-- fragment: wanted
-- The filter of a list, a redrive or a discard. Without numbers, it selects only letters that wait, or all.
(%(subscriber_id)s::text IS NULL OR letter.subscriber_id = %(subscriber_id)s)
  AND (%(reasons)s::text[] IS NULL OR letter.reason = ANY(%(reasons)s))
  AND (%(error)s::text IS NULL OR position(lower(%(error)s) IN lower(letter.error)) > 0)
  AND letter.parked_at >= coalesce(now() - %(since_ago)s::interval, %(since)s::timestamptz, '-infinity')
  AND letter.parked_at < coalesce(now() - %(until_ago)s::interval, %(until)s::timestamptz, 'infinity')
  AND (%(up_to)s::bigint IS NULL OR letter.dead_letter_id <= %(up_to)s)
  AND (%(source)s::text IS NULL OR letter.source = %(source)s)
  AND (%(message_ids)s::text[] IS NULL OR letter.message_id = ANY(%(message_ids)s))
  AND NOT EXISTS (
    SELECT FROM unnest(%(header_names)s::text[], %(header_values)s::text[]) AS asked (name, value)
    WHERE NOT EXISTS (
      SELECT FROM jsonb_each_text(letter.headers) AS header (name, value)
      WHERE lower(header.name) = asked.name AND header.value = asked.value
    )
  )
  AND CASE WHEN %(numbers)s::bigint[] IS NULL THEN %(all)s OR {{waits}}
    ELSE letter.dead_letter_id = ANY(%(numbers)s) END

-- fragment: finds_json
pg_temp.txbox_finds_json(letter.body, %(json_path)s::jsonpath)

-- name: check_json_path
-- Check whether a text is a JSON path: fails if it is not.
-- parameters: json_path text
-- returns: nothing of interest
SELECT %(json_path)s::jsonpath

-- name: create_json_function
-- Make a function for this transaction: whether a JSON path finds something other than false and null in a body.
-- Null for a body that is not JSON, is nested too deeply for the server, or has a \u0000, which jsonb cannot hold.
-- parameters: none
-- returns: nothing
CREATE FUNCTION pg_temp.txbox_finds_json(body bytea, path jsonpath) RETURNS boolean
LANGUAGE plpgsql COST 10000 AS $$
BEGIN
  RETURN EXISTS (
    SELECT FROM jsonb_path_query(convert_from(body, 'UTF8')::jsonb, path, '{}', true) AS found (item)
    WHERE found.item NOT IN ('false', 'null')
  );
EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
  RETURN NULL;
END $$

-- name: drop_json_function
-- Drop the function before the transaction commits.
-- parameters: none
-- returns: nothing
DROP FUNCTION pg_temp.txbox_finds_json(bytea, jsonpath)

-- name: letters
-- A page of dead letters.
-- parameters: subscriber_id text, reasons text[], error text, since_ago interval, since timestamptz, until_ago interval,
--   until timestamptz, source text, message_ids text[], header_names text[] (in lower case), header_values text[],
--   numbers bigint[] (null, of all of these: any), up_to bigint, all boolean (also those that do not wait), after bigint,
--   page bigint, body_from int, body_bytes int
-- returns: letters
SELECT {{letter}} FROM {{dead_letter}} AS letter
WHERE {{wanted}} AND letter.dead_letter_id > %(after)s
ORDER BY letter.dead_letter_id LIMIT %(page)s

-- name: passed_over
-- How many letters match the rest of a filter, but have bodies that its JSON path cannot check.
-- parameters: subscriber_id text, reasons text[], error text, since_ago interval, since timestamptz, until_ago interval,
--   until timestamptz, source text, message_ids text[], header_names text[], header_values text[], numbers bigint[],
--   up_to bigint, all boolean (as letters), json_path text
-- returns: their count
SELECT count(*) FROM {{dead_letter}} AS letter WHERE {{wanted}} AND {{finds_json}} IS NULL

-- name: matching_counts
-- How many letters a filter matches, and how many of them a redrive refuses because an earlier one of their key waits.
-- parameters: subscriber_id text, reasons text[], error text, since_ago interval, since timestamptz, until_ago interval,
--   until timestamptz, source text, message_ids text[], header_names text[], header_values text[], numbers bigint[],
--   up_to bigint, all boolean (as letters), expired boolean (those are sent, too)
-- returns: subscriber_id, reason, letters, when the oldest was parked, those that are refused
WITH meant AS (
  SELECT letter.dead_letter_id, letter.subscriber_id, letter.reason, letter.parked_at, letter.order_key,
    letter.order_position
  FROM {{dead_letter}} AS letter WHERE {{wanted}}
), kept AS (
  SELECT letter.subscriber_id, letter.order_key, min(letter.order_position) AS order_position
  FROM {{dead_letter}} AS letter
  WHERE letter.redriven_at IS NULL AND {{holds}} AND (
    letter.dead_letter_id NOT IN (SELECT meant.dead_letter_id FROM meant)
    OR letter.reason = 'expired' AND NOT %(expired)s
  )
  GROUP BY letter.subscriber_id, letter.order_key
)
SELECT meant.subscriber_id, meant.reason, count(*) AS letters, {{microseconds(min(meant.parked_at))}} AS oldest_at,
  count(*) FILTER (WHERE kept.order_position < meant.order_position) AS behind
FROM meant LEFT JOIN kept USING (subscriber_id, order_key)
GROUP BY meant.subscriber_id, meant.reason ORDER BY meant.subscriber_id, meant.reason

-- name: store_operation
-- Record who asks for what.
-- parameters: kind text, filter jsonb, options jsonb, note text, requested_by text
-- returns: operation_id
INSERT INTO {{dead_letter_operation}} (kind, filter, options, note, requested_by)
VALUES (%(kind)s, %(filter)s::jsonb, %(options)s::jsonb, %(note)s, %(requested_by)s)
RETURNING operation_id

-- name: store_selection
-- Record which letters a filter matches now.
-- parameters: operation_id bigint, subscriber_id text, reasons text[], error text, since_ago interval, since
--   timestamptz, until_ago interval, until timestamptz, source text, message_ids text[], header_names text[],
--   header_values text[], numbers bigint[], up_to bigint, all boolean (as letters)
-- returns: nothing; the count of rows
INSERT INTO {{dead_letter_selection}} (operation_id, dead_letter_id)
SELECT %(operation_id)s, letter.dead_letter_id FROM {{dead_letter}} AS letter WHERE {{wanted}}

-- name: operations
-- Redrives and discards, newest first.
-- parameters: operation_id bigint (or null for all), unfinished boolean (only those), page bigint
-- returns: operation_id, kind, filter, options, note, requested_by, requested_at, finished_at, outcomes (a JSON object
--   of counts)
SELECT operation.operation_id, operation.kind, operation.filter, operation.options, operation.note,
  operation.requested_by, {{microseconds(operation.requested_at)}} AS requested_at,
  {{microseconds(operation.finished_at)}} AS finished_at, (
    SELECT coalesce(jsonb_object_agg(counted.outcome, counted.letters), '{}')
    FROM (
      SELECT coalesce(selected.outcome, 'pending') AS outcome, count(*) AS letters
      FROM {{dead_letter_selection}} AS selected WHERE selected.operation_id = operation.operation_id
      GROUP BY selected.outcome
    ) AS counted
  ) AS outcomes
FROM {{dead_letter_operation}} AS operation
WHERE (%(operation_id)s::bigint IS NULL OR operation.operation_id = %(operation_id)s)
  AND NOT (%(unfinished)s AND operation.finished_at IS NOT NULL)
ORDER BY operation.operation_id DESC LIMIT %(page)s

-- name: next_selected
-- Lock and return an operation's next letter, until the transaction ends.
--
-- Two processes that carry out one operation take turns: the second waits for the first one's letter, then finds its
-- outcome and goes on to the next. It does not skip what is locked, so letters are sent one after the other, in order.
--
-- parameters: operation_id bigint, after bigint
-- returns: dead_letter_id, or no row
SELECT dead_letter_id FROM {{dead_letter_selection}}
WHERE operation_id = %(operation_id)s AND dead_letter_id > %(after)s AND outcome IS NULL
ORDER BY dead_letter_id LIMIT 1 FOR UPDATE

-- name: lock_selected
-- Lock and return a letter of an operation, if it is not done yet, until the transaction ends.
-- parameters: operation_id bigint, dead_letter_id bigint
-- returns: dead_letter_id, or no row
SELECT dead_letter_id FROM {{dead_letter_selection}}
WHERE operation_id = %(operation_id)s AND dead_letter_id = %(dead_letter_id)s AND outcome IS NULL FOR UPDATE

-- name: record_outcome
-- Record the outcome of a selected letter, unless another process has recorded it.
-- parameters: outcome text, error text, operation_id bigint, dead_letter_id bigint
-- returns: nothing; the count of rows
UPDATE {{dead_letter_selection}} SET outcome = %(outcome)s, error = %(error)s, done_at = now()
WHERE operation_id = %(operation_id)s AND dead_letter_id = %(dead_letter_id)s AND outcome IS NULL

-- name: retry_failed
-- Make an operation's failed letters pending again.
-- parameters: operation_id bigint
-- returns: nothing
UPDATE {{dead_letter_selection}} SET outcome = NULL, error = NULL, done_at = NULL
WHERE operation_id = %(operation_id)s AND outcome = 'failed'

-- name: finish_operation
-- Mark an operation as finished if none of its letters is left or has failed.
-- parameters: operation_id bigint
-- returns: nothing
UPDATE {{dead_letter_operation}} SET finished_at = now()
WHERE operation_id = %(operation_id)s AND finished_at IS NULL AND NOT EXISTS (
  SELECT FROM {{dead_letter_selection}} AS selected
  WHERE selected.operation_id = %(operation_id)s AND coalesce(selected.outcome, 'failed') = 'failed'
)

-- name: letter_of
-- One dead letter.
-- parameters: dead_letter_id bigint, body_from int, body_bytes int (null: all)
-- returns: a letter
SELECT {{letter}} FROM {{dead_letter}} AS letter WHERE letter.dead_letter_id = %(dead_letter_id)s

-- name: lock_letters
-- Lock a dead letter and the open ones with the same id, until the transaction ends. So two redrives do not both send
-- it, and do not deadlock. Later statements read the letters: this one's snapshot does not have what it waited for.
-- parameters: dead_letter_id bigint
-- returns: dead_letter_id of each
SELECT dead_letter_id FROM {{dead_letter}}
WHERE dead_letter_id = ANY(ARRAY(
  SELECT letter.dead_letter_id
  FROM {{dead_letter}} AS letter JOIN {{dead_letter}} AS this USING (subscriber_id, message_id)
  WHERE this.dead_letter_id = %(dead_letter_id)s AND {{open}}
) || %(dead_letter_id)s::bigint)
ORDER BY dead_letter_id FOR UPDATE

-- name: mark_redriven
-- Mark a dead letter as sent through again.
-- parameters: redriven_by text, dead_letter_id bigint
-- returns: nothing
UPDATE {{dead_letter}} SET redriven_at = now(), redriven_by = %(redriven_by)s WHERE dead_letter_id = %(dead_letter_id)s

-- name: mark_discarded
-- Mark a dead letter as given up. Its row in the inbox stays, so no copy of its message runs.
-- parameters: discarded_by text, note text, dead_letter_id bigint
-- returns: nothing
UPDATE {{dead_letter}} SET discarded_at = now(), discarded_by = %(discarded_by)s, note = %(note)s
WHERE dead_letter_id = %(dead_letter_id)s

-- name: letter_counts
-- Dead letters that wait for a person.
-- parameters: none
-- returns: subscriber_id, reason, letters, since when the oldest waits
SELECT subscriber_id, reason, count(*), {{microseconds(min(parked_at))}}
FROM {{dead_letter}} AS letter WHERE {{waits}}
GROUP BY subscriber_id, reason ORDER BY subscriber_id, reason
