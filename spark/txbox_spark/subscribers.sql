-- Subscribers, as far as the inbox has ids of them.

-- name: any_processed
-- Whether a subscriber has an id in the inbox.
-- parameters: subscriber_id text
-- returns: a row, if there is one
SELECT FROM {{processed_message}} WHERE subscriber_id = %(subscriber_id)s LIMIT 1

-- name: some_subscribers
-- Up to five subscribers that have, by one step in the primary key for each.
-- parameters: none
-- returns: subscriber_id
WITH RECURSIVE found AS (
  (SELECT subscriber_id FROM {{processed_message}} ORDER BY subscriber_id LIMIT 1)
  UNION ALL
  SELECT (
    SELECT processed.subscriber_id FROM {{processed_message}} AS processed
    WHERE processed.subscriber_id > found.subscriber_id ORDER BY processed.subscriber_id LIMIT 1
  )
  FROM found WHERE found.subscriber_id IS NOT NULL
)
SELECT subscriber_id FROM found WHERE subscriber_id IS NOT NULL LIMIT 5
