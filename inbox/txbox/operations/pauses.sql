-- What is paused: a row for each subscriber or destination. Workers and relays read it every few seconds.

-- name: pause
-- Pause a subscriber or a destination. One that is paused already stays as it is.
-- parameters: kind text, name text, paused_by text, note text
-- returns: nothing; the row count says whether it was not paused
INSERT INTO {{paused}} (kind, name, paused_by, note) VALUES (%(kind)s, %(name)s, %(paused_by)s, %(note)s)
ON CONFLICT (kind, name) DO NOTHING

-- name: resume
-- End a pause.
-- parameters: kind text, name text
-- returns: nothing; the row count says whether it was paused
DELETE FROM {{paused}} WHERE kind = %(kind)s AND name = %(name)s

-- name: pauses
-- Everything that is paused.
-- parameters: none
-- returns: kind, name, paused_by, note, paused_at
SELECT kind, name, paused_by, note, {{microseconds(paused_at)}} AS paused_at FROM {{paused}} ORDER BY kind, name

-- name: is_subscriber
-- Whether a subscriber of this name has left a trace. Each table has an index, or is small.
-- parameters: name text, first_lane bigint, last_lane bigint (of what waits for its workers in the outbox)
-- returns: a boolean
SELECT EXISTS (SELECT FROM {{worker_report}} WHERE subscriber_id = %(name)s)
  OR EXISTS (SELECT FROM {{processed_message}} WHERE subscriber_id = %(name)s)
  OR EXISTS (SELECT FROM {{message_failure}} WHERE subscriber_id = %(name)s)
  OR EXISTS (SELECT FROM {{dead_letter}} WHERE subscriber_id = %(name)s)
  OR EXISTS (SELECT FROM {{message_lease}} WHERE subscriber_id = %(name)s)
  OR EXISTS (SELECT FROM {{outbox_message}} WHERE lane BETWEEN %(first_lane)s AND %(last_lane)s)

-- name: is_destination
-- Whether a destination of this name has left a trace: messages that wait, reports of relays, dead letters.
-- parameters: name text, first_lane bigint, last_lane bigint (of this destination), letters_of text (their subscriber)
-- returns: a boolean
SELECT EXISTS (SELECT FROM {{outbox_message}} WHERE lane BETWEEN %(first_lane)s AND %(last_lane)s)
  OR EXISTS (SELECT FROM {{outbox_relay}} WHERE jsonb_exists(destinations, %(name)s))
  OR EXISTS (SELECT FROM {{outbox_relay}} WHERE jsonb_exists(outages, %(name)s))
  OR EXISTS (SELECT FROM {{dead_letter}} WHERE subscriber_id = %(letters_of)s)
