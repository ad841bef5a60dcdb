-- The horizon: which messages are too old to judge. age_judge.py says why these are separate statements.

-- name: behind_horizon
-- Which of some first messages were sent before the horizon. No row if the subscriber forgets nothing. A message was
-- not processed while it was parked; if it was redriven since the horizon, it can be judged. A mismatch says nothing
-- about that: the message that came first under its id may have been processed.
-- parameters: subscriber_id text, message_ids text[], sent_at bigint[] (microseconds since 1970, null if unknown)
-- returns: message_id, the horizon in microseconds since 1970
SELECT message.id, {{microseconds(horizon.horizon)}}
FROM {{inbox_horizon}} AS horizon, unnest(%(message_ids)s::text[], %(sent_at)s::bigint[]) AS message (id, sent_at)
WHERE horizon.subscriber_id = %(subscriber_id)s
  AND (message.sent_at IS NULL OR message.sent_at < {{microseconds(horizon.horizon)}})
  AND NOT EXISTS (
    SELECT FROM {{dead_letter}} AS letter
    WHERE letter.subscriber_id = %(subscriber_id)s AND letter.message_id = message.id
      AND letter.redriven_at >= horizon.horizon AND letter.reason <> 'mismatch'
  )

-- name: take_back
-- Take back ids that this transaction, or a savepoint in it, has just recorded: they have the time when it began. At
-- REPEATABLE READ its snapshot may still have rows that a maintainer has deleted; those are older.
-- parameters: subscriber_id text, message_ids text[]
-- returns: nothing
DELETE FROM {{processed_message}}
WHERE subscriber_id = %(subscriber_id)s AND message_id = ANY(%(message_ids)s::text[]) AND processed_at = now()
