-- Responses, kept in the same transaction as the effects of their requests.

-- name: keep
-- Keep the response to a request in the transaction that has recorded it. An existing row is older than the inbox's
-- memory of the id: unless the id's row in the inbox was forgotten, this transaction could not have recorded it. If the
-- handler has ended the transaction, this is another one, whose time no row in the inbox has: nothing is kept.
-- parameters: subscriber_id text, message_id text, fingerprint bytea, status integer, headers text (JSON), body bytea
-- returns: 1; no row if this transaction has not recorded the id
INSERT INTO {{kept_response}} AS kept (subscriber_id, message_id, fingerprint, status, headers, body)
SELECT subscriber_id, message_id, %(fingerprint)s::bytea, %(status)s::integer, %(headers)s::text::jsonb, %(body)s::bytea
FROM {{processed_message}}
WHERE subscriber_id = %(subscriber_id)s::text AND message_id = %(message_id)s::text AND processed_at = now()
ON CONFLICT (subscriber_id, message_id) DO UPDATE SET kept_at = excluded.kept_at, fingerprint = excluded.fingerprint,
  status = excluded.status, headers = excluded.headers, body = excluded.body
RETURNING 1

-- name: find
-- Read what is known of a duplicate. A response counts only if the transaction that recorded the id has kept it: both
-- rows then have the start time of that transaction. A response from before the id was forgotten does not count.
-- parameters: subscriber_id text, message_id text
-- returns: parked, and of the response: fingerprint, status, headers (JSON), body (or null)
SELECT processed.dead_letter_id IS NOT NULL, kept.fingerprint, kept.status, kept.headers::text, kept.body
FROM {{processed_message}} AS processed LEFT JOIN {{kept_response}} AS kept
  ON kept.subscriber_id = processed.subscriber_id AND kept.message_id = processed.message_id
  AND kept.kept_at = processed.processed_at
WHERE processed.subscriber_id = %(subscriber_id)s::text AND processed.message_id = %(message_id)s::text
