-- Dead letters for people. There may be a million, of which a filter matches few. So each statement reads one stretch
-- of numbers, the newest first, or the waiting letters of one subscriber, if these are few.

-- fragment: line
letter.dead_letter_id, letter.subscriber_id, letter.message_id, letter.reason, left(letter.error, 20000) AS error,
  letter.attempts, letter.source, {{microseconds(letter.parked_at)}} AS parked_at,
  {{microseconds(letter.redriven_at)}} AS redriven_at, {{microseconds(letter.discarded_at)}} AS discarded_at,
  letter.order_key, {{open}} AND {{processed_since}} AS processed_since

-- fragment: stretch
(SELECT * FROM {{dead_letter}} AS every WHERE every.dead_letter_id < %(before)s
  ORDER BY every.dead_letter_id DESC LIMIT %(stretch)s) AS letter

-- fragment: few
(SELECT * FROM {{dead_letter}} AS every
  WHERE every.subscriber_id = %(subscriber_id)s AND every.redriven_at IS NULL AND every.discarded_at IS NULL
  LIMIT %(stretch)s) AS letter

-- fragment: chosen
(SELECT * FROM {{dead_letter}} AS every WHERE every.dead_letter_id = ANY(%(chosen)s::bigint[])) AS letter

-- name: newest
-- The highest number of a letter, or 0 if there is none.
-- parameters: none
-- returns: number
SELECT coalesce(max(dead_letter_id), 0) AS number FROM {{dead_letter}}

-- name: of_numbers
-- The letters among these numbers that match a filter, the newest first. Also takes the filter's parameters.
-- parameters: chosen bigint[], before bigint, page int
-- returns: as in_stretch
SELECT {{line}} FROM {{chosen}} WHERE {{wanted}} AND letter.dead_letter_id < %(before)s
ORDER BY letter.dead_letter_id DESC LIMIT %(page)s

-- name: counts_of_numbers
-- How many of them wait. Also takes the filter's parameters.
-- parameters: chosen bigint[]
-- returns: as counts_in_stretch
SELECT letter.subscriber_id, letter.reason, count(*) AS letters FROM {{chosen}} WHERE {{wanted}} AND {{waits}} GROUP BY 1, 2

-- name: edge
-- Where a stretch ends.
-- parameters: before bigint, stretch int
-- returns: lowest (null: there are no letters before), letters
SELECT min(letter.dead_letter_id) AS lowest, count(*) AS letters FROM (
  SELECT every.dead_letter_id FROM {{dead_letter}} AS every WHERE every.dead_letter_id < %(before)s
  ORDER BY every.dead_letter_id DESC LIMIT %(stretch)s
) AS letter

-- name: in_stretch
-- The letters of a stretch that match a filter, the newest first. Also takes the filter's parameters.
-- parameters: before bigint, stretch int, page int
-- returns: the columns of the fragment line
SELECT {{line}} FROM {{stretch}} WHERE {{wanted}} ORDER BY letter.dead_letter_id DESC LIMIT %(page)s

-- name: counts_in_stretch
-- How many of them there are. Also takes the filter's parameters.
-- parameters: before bigint, stretch int
-- returns: subscriber_id, reason, letters
SELECT letter.subscriber_id, letter.reason, count(*) AS letters FROM {{stretch}} WHERE {{wanted}} GROUP BY 1, 2

-- name: count_of_subscriber
-- How many letters of a subscriber wait, counted up to a limit.
-- parameters: subscriber_id text, stretch int
-- returns: letters
SELECT count(*) AS letters FROM {{few}}

-- name: of_subscriber
-- The letters of a subscriber that match a filter, the newest first, among a limited number that wait. Also takes
-- the filter's parameters.
-- parameters: subscriber_id text, before bigint, stretch int, page int
-- returns: as in_stretch
SELECT {{line}} FROM {{few}} WHERE {{wanted}} AND letter.dead_letter_id < %(before)s
ORDER BY letter.dead_letter_id DESC LIMIT %(page)s

-- name: counts_of_subscriber
-- How many of them there are. Also takes the filter's parameters.
-- parameters: subscriber_id text, stretch int
-- returns: as counts_in_stretch
SELECT letter.subscriber_id, letter.reason, count(*) AS letters FROM {{few}} WHERE {{wanted}} GROUP BY 1, 2

-- name: values
-- What fields of letters hold, at most 100 of each: subscribers, by jumping along an index; the newest letters' sources.
-- parameters: stretch int
-- returns: field, value
WITH RECURSIVE parked AS (
  (SELECT subscriber_id FROM {{dead_letter}} ORDER BY subscriber_id LIMIT 1)
  UNION ALL
  SELECT next.subscriber_id FROM parked CROSS JOIN LATERAL (SELECT m.subscriber_id FROM {{dead_letter}} AS m
    WHERE m.subscriber_id > parked.subscriber_id ORDER BY m.subscriber_id LIMIT 1) AS next
)
(SELECT 'subscriber' AS field, subscriber_id AS value FROM parked LIMIT 100)
UNION ALL (SELECT DISTINCT 'source', newest.source FROM (
  SELECT source FROM {{dead_letter}} ORDER BY dead_letter_id DESC LIMIT %(stretch)s
) AS newest ORDER BY 2 LIMIT 100)

-- name: one_letter
-- One letter. Also takes the parameters of the fragment letter.
-- parameters: number bigint
-- returns: the columns of DeadLetter
SELECT {{letter}} FROM {{dead_letter}} AS letter WHERE letter.dead_letter_id = %(number)s

-- name: operations_of
-- Those of the latest operations that selected a letter, and what became of it.
-- parameters: number bigint
-- returns: operation_id, kind, requested_by, note, outcome, error, done_at
SELECT operation.operation_id, operation.kind, operation.requested_by, operation.note, selected.outcome, selected.error,
  {{microseconds(selected.done_at)}} AS done_at
FROM (SELECT * FROM {{dead_letter_operation}} AS every ORDER BY every.operation_id DESC LIMIT 100) AS operation
JOIN {{dead_letter_selection}} AS selected
  ON selected.operation_id = operation.operation_id AND selected.dead_letter_id = %(number)s
ORDER BY operation.operation_id DESC

-- name: last_operations
-- The last redrives and discards. In a large one, only the last letters are counted, which are done last.
-- parameters: limit int, counted int
-- returns: operation_id, kind, filter, note, requested_by, requested_at, finished_at, outcomes (a JSON object of counts),
--   letters (at most counted + 1)
SELECT operation.operation_id, operation.kind, operation.filter, operation.note, operation.requested_by,
  {{microseconds(operation.requested_at)}} AS requested_at, {{microseconds(operation.finished_at)}} AS finished_at, (
    SELECT coalesce(jsonb_object_agg(counted.outcome, counted.letters), '{}') FROM (
      SELECT coalesce(last.outcome, 'pending') AS outcome, count(*) AS letters FROM (
        SELECT selected.outcome FROM {{dead_letter_selection}} AS selected
        WHERE selected.operation_id = operation.operation_id ORDER BY selected.dead_letter_id DESC LIMIT %(counted)s
      ) AS last GROUP BY 1
    ) AS counted
  ) AS outcomes, (
    SELECT count(*) FROM (
      SELECT FROM {{dead_letter_selection}} AS selected WHERE selected.operation_id = operation.operation_id
      LIMIT %(counted)s + 1
    ) AS bounded
  ) AS letters
FROM {{dead_letter_operation}} AS operation ORDER BY operation.operation_id DESC LIMIT %(limit)s
