-- The order of a key across its dead letters: which letter holds a key, and the place of each.
--
-- A letter holds its key until its message is processed. What this very transaction recorded does not count as
-- processed: it is the copy that asks.

-- fragment: holds
letter.order_position IS NOT NULL AND letter.discarded_at IS NULL AND NOT EXISTS (
    SELECT FROM {{processed_message}} AS processed
    WHERE processed.subscriber_id = letter.subscriber_id AND processed.message_id = letter.message_id
      AND processed.dead_letter_id IS NULL AND processed.xmin IS DISTINCT FROM pg_current_xact_id_if_assigned()::xid
  ) AND NOT EXISTS (
    SELECT FROM {{inbox_horizon}} AS forgotten
    WHERE forgotten.subscriber_id = letter.subscriber_id AND letter.redriven_at < forgotten.horizon
  )

-- name: heads
-- For each held key, the first of the letters that hold it.
-- parameters: order_keys text[], subscriber_id text
-- returns: order_key, dead_letter_id, message_id
SELECT asked.order_key, head.dead_letter_id, head.message_id
FROM unnest(%(order_keys)s::text[]) AS asked (order_key)
CROSS JOIN LATERAL (
  SELECT letter.dead_letter_id, letter.message_id FROM {{dead_letter}} AS letter
  WHERE letter.subscriber_id = %(subscriber_id)s AND letter.order_key = asked.order_key AND {{holds}}
  ORDER BY letter.order_position LIMIT 1
) AS head

-- name: place_of
-- Whether letters wait before the place of a message that is parked or was sent through again.
-- parameters: subscriber_id text, message_ids text[] (all that the message has), order_key text
-- returns: whether one waits; no row if the message has no place
SELECT coalesce(own.place > (
  SELECT letter.order_position FROM {{dead_letter}} AS letter
  WHERE letter.subscriber_id = %(subscriber_id)s AND letter.order_key = %(order_key)s AND letter.redriven_at IS NULL
    AND {{holds}}
  ORDER BY letter.order_position LIMIT 1
), false)
FROM (
  SELECT min(letter.order_position) AS place FROM {{dead_letter}} AS letter
  WHERE letter.subscriber_id = %(subscriber_id)s AND letter.message_id = ANY(%(message_ids)s::text[])
    AND letter.order_key = %(order_key)s AND letter.discarded_at IS NULL
) AS own
WHERE own.place IS NOT NULL

-- name: give_up_places
-- Remove the places of a message that this transaction processes: its letters no longer hold anything.
-- parameters: subscriber_id text, message_ids text[] (all that the message has), order_key text
-- returns: nothing
UPDATE {{dead_letter}} SET order_position = NULL
WHERE subscriber_id = %(subscriber_id)s AND message_id = ANY(%(message_ids)s::text[]) AND order_key = %(order_key)s
  AND order_position IS NOT NULL

-- name: take_place
-- Give a letter its place: that of the message's earlier letter that was sent through again, or else the last place.
-- parameters: message_ids text[] (all that the message has), dead_letter_id bigint
-- returns: nothing; the count of rows is 0 if it has its place, or keeps no order
UPDATE {{dead_letter}} AS letter SET order_position = coalesce((
  SELECT min(earlier.order_position) FROM {{dead_letter}} AS earlier
  WHERE earlier.subscriber_id = letter.subscriber_id AND earlier.message_id = ANY(%(message_ids)s::text[])
    AND earlier.order_key = letter.order_key AND earlier.discarded_at IS NULL
), letter.dead_letter_id)
WHERE letter.dead_letter_id = %(dead_letter_id)s AND letter.order_key IS NOT NULL AND letter.order_position IS NULL

-- name: hand_over_place
-- Remove the places of a message's redriven letters, because another letter of the message has taken them over.
-- parameters: subscriber_id text, message_ids text[] (all that the message has), dead_letter_id bigint (the other one)
-- returns: nothing
UPDATE {{dead_letter}} SET order_position = NULL
WHERE subscriber_id = %(subscriber_id)s AND message_id = ANY(%(message_ids)s::text[]) AND order_position IS NOT NULL
  AND dead_letter_id <> %(dead_letter_id)s AND redriven_at IS NOT NULL

-- name: find_before
-- The first letter of a key that waits before another one.
-- parameters: dead_letter_id bigint
-- returns: dead_letter_id
SELECT head.dead_letter_id
FROM {{dead_letter}} AS this CROSS JOIN LATERAL (
  SELECT letter.dead_letter_id, letter.order_position FROM {{dead_letter}} AS letter
  WHERE letter.subscriber_id = this.subscriber_id AND letter.order_key = this.order_key
    AND letter.message_id <> this.message_id AND letter.redriven_at IS NULL AND {{holds}}
  ORDER BY letter.order_position LIMIT 1
) AS head
WHERE this.dead_letter_id = %(dead_letter_id)s AND head.order_position < this.order_position

-- name: held_keys
-- How many keys are held, by subscriber.
-- parameters: none
-- returns: subscriber_id, keys, since when the oldest letter that holds one was parked
SELECT letter.subscriber_id, count(DISTINCT letter.order_key), {{microseconds(min(letter.parked_at))}}
FROM {{dead_letter}} AS letter WHERE {{holds}} GROUP BY letter.subscriber_id

-- fragment: held_heads
-- For each held key of an operation's letters: the first letter that waits, or else the first one on its way. It is
-- stuck if it failed for another reason than being behind another, or could not be sent: it needs a person.
SELECT key.subscriber_id, key.order_key, head.dead_letter_id, head.waits,
  head.waits AND (head.reason <> 'behind' OR coalesce(own.outcome = 'failed', false)) AS stuck
FROM (
  SELECT DISTINCT letter.subscriber_id, letter.order_key
  FROM {{dead_letter_selection}} AS selected JOIN {{dead_letter}} AS letter USING (dead_letter_id)
  WHERE selected.operation_id = %(operation_id)s AND letter.order_key IS NOT NULL
) AS key
CROSS JOIN LATERAL (
  SELECT letter.dead_letter_id, letter.reason, letter.redriven_at IS NULL AS waits FROM {{dead_letter}} AS letter
  WHERE letter.subscriber_id = key.subscriber_id AND letter.order_key = key.order_key AND {{holds}}
  ORDER BY letter.redriven_at IS NOT NULL, letter.order_position LIMIT 1
) AS head
LEFT JOIN {{dead_letter_selection}} AS own
  ON own.operation_id = %(operation_id)s AND own.dead_letter_id = head.dead_letter_id

-- name: held_by_operation
-- The keys of an operation's letters that are held.
-- parameters: operation_id bigint
-- returns: subscriber_id, order_key, dead_letter_id, waits, stuck
{{held_heads}}
ORDER BY 1, 2

-- name: follow
-- Add to an operation what was parked behind its letters since it was selected; in one order, so that two of these do
-- not deadlock.
-- parameters: operation_id bigint
-- returns: nothing
INSERT INTO {{dead_letter_selection}} (operation_id, dead_letter_id)
SELECT %(operation_id)s, letter.dead_letter_id
FROM ({{held_heads}}) AS held JOIN {{dead_letter}} AS letter USING (subscriber_id, order_key)
WHERE NOT held.stuck AND letter.reason = 'behind' AND letter.redriven_at IS NULL AND {{holds}}
ORDER BY letter.dead_letter_id
ON CONFLICT DO NOTHING
