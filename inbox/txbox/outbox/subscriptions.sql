-- Who gets the messages of a topic: a row for each subscriber.

-- name: add
-- Subscribe to a topic. A subscription that is there already stays as it is.
-- parameters: topic text, subscriber_id text, first_lane bigint (of the subscriber's destination)
-- returns: nothing; the row count says whether it is new
INSERT INTO {{subscription}} (topic, subscriber_id, first_lane)
VALUES (%(topic)s, %(subscriber_id)s, %(first_lane)s)
ON CONFLICT (topic, subscriber_id) DO NOTHING

-- name: remove
-- End a subscription.
-- parameters: topic text, subscriber_id text
-- returns: nothing; the row count says whether there was one
DELETE FROM {{subscription}} WHERE topic = %(topic)s AND subscriber_id = %(subscriber_id)s

-- name: all_of_them
-- All subscriptions.
-- parameters: none
-- returns: topic, subscriber_id, added_at
SELECT topic, subscriber_id, {{microseconds(added_at)}} AS added_at FROM {{subscription}} ORDER BY topic, subscriber_id
