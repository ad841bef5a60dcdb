-- All subscribers, and one. Tables may have any size, so each statement jumps along an index or stops at a limit.

-- name: subscribers
-- The subscribers that have left a trace, by name.
-- parameters: most int
-- returns: subscriber_id
WITH RECURSIVE processed AS (
  (SELECT subscriber_id FROM {{processed_message}} ORDER BY subscriber_id LIMIT 1)
  UNION ALL
  SELECT next.subscriber_id FROM processed CROSS JOIN LATERAL (
    SELECT m.subscriber_id FROM {{processed_message}} AS m WHERE m.subscriber_id > processed.subscriber_id
    ORDER BY m.subscriber_id LIMIT 1
  ) AS next
), failing AS (
  (SELECT subscriber_id FROM {{message_failure}} ORDER BY subscriber_id LIMIT 1)
  UNION ALL
  SELECT next.subscriber_id FROM failing CROSS JOIN LATERAL (
    SELECT m.subscriber_id FROM {{message_failure}} AS m WHERE m.subscriber_id > failing.subscriber_id
    ORDER BY m.subscriber_id LIMIT 1
  ) AS next
), parked AS (
  (SELECT subscriber_id FROM {{dead_letter}} ORDER BY subscriber_id LIMIT 1)
  UNION ALL
  SELECT next.subscriber_id FROM parked CROSS JOIN LATERAL (
    SELECT m.subscriber_id FROM {{dead_letter}} AS m WHERE m.subscriber_id > parked.subscriber_id
    ORDER BY m.subscriber_id LIMIT 1
  ) AS next
), leased AS (
  (SELECT subscriber_id FROM {{message_lease}} ORDER BY subscriber_id LIMIT 1)
  UNION ALL
  SELECT next.subscriber_id FROM leased CROSS JOIN LATERAL (
    SELECT m.subscriber_id FROM {{message_lease}} AS m WHERE m.subscriber_id > leased.subscriber_id
    ORDER BY m.subscriber_id LIMIT 1
  ) AS next
)
SELECT subscriber_id FROM (
  (SELECT subscriber_id FROM processed LIMIT %(most)s) UNION (SELECT subscriber_id FROM failing LIMIT %(most)s)
  UNION (SELECT subscriber_id FROM parked LIMIT %(most)s) UNION (SELECT subscriber_id FROM leased LIMIT %(most)s)
  UNION SELECT subscriber_id FROM {{worker_report}}
  UNION SELECT name FROM {{paused}} WHERE kind = 'subscriber'
) AS known ORDER BY subscriber_id LIMIT %(most)s

-- name: troubles
-- How many messages of each subscriber wait for another attempt, and how many dead letters wait, counted up to a limit.
-- Those processed since are left out, but only the first ones are looked up: all of them would take too long.
-- parameters: subscriber_ids text[], limit bigint, checked bigint (messages of each to look up)
-- returns: subscriber_id, retrying, letters
SELECT wanted.subscriber_id,
  failing.number - CASE WHEN failing.number < %(limit)s THEN (SELECT count(*) FROM (
    SELECT * FROM {{message_failure}} AS m WHERE m.subscriber_id = wanted.subscriber_id LIMIT %(checked)s
  ) AS failure WHERE {{resent}}) ELSE 0 END AS retrying,
  parked.number - CASE WHEN parked.number < %(limit)s THEN (SELECT count(*) FROM (
    SELECT * FROM {{dead_letter}} AS letter WHERE subscriber_id = wanted.subscriber_id AND {{open}} LIMIT %(checked)s
  ) AS letter WHERE {{processed_since}}) ELSE 0 END AS letters
FROM unnest(%(subscriber_ids)s::text[]) AS wanted (subscriber_id)
CROSS JOIN LATERAL (SELECT count(*) AS number FROM (
  SELECT FROM {{message_failure}} AS m WHERE m.subscriber_id = wanted.subscriber_id LIMIT %(limit)s
) AS bounded) AS failing
CROSS JOIN LATERAL (SELECT count(*) AS number FROM (
  SELECT FROM {{dead_letter}} AS letter WHERE subscriber_id = wanted.subscriber_id AND {{open}} LIMIT %(limit)s
) AS bounded) AS parked

-- name: failing
-- Some of a subscriber's messages that wait for another attempt.
-- parameters: subscriber_id text, limit bigint
-- returns: message_id, attempts, error, first_failed_at, last_failed_at
SELECT message_id, attempts, left(error, 20000) AS error, {{microseconds(first_failed_at)}} AS first_failed_at,
  {{microseconds(last_failed_at)}} AS last_failed_at
FROM {{message_failure}} AS failure WHERE subscriber_id = %(subscriber_id)s AND NOT {{resent}} ORDER BY message_id LIMIT %(limit)s

-- name: letters_by_reason
-- A subscriber's waiting dead letters by reason, counted up to a limit.
-- parameters: subscriber_id text, limit bigint
-- returns: reason, letters
SELECT reason, count(*) AS letters FROM (
  SELECT * FROM {{dead_letter}} AS letter WHERE subscriber_id = %(subscriber_id)s AND {{open}} LIMIT %(limit)s
) AS letter WHERE NOT {{processed_since}} GROUP BY reason ORDER BY letters DESC, reason
