-- Sent messages that are kept, in outbox_sent, and their replay.

-- The filter. Its times let the index on sent_at find the messages.
-- fragment: wanted
(%(destination)s::text IS NULL OR destination = %(destination)s::text)
  AND (%(key)s::text IS NULL OR key = %(key)s::text)
  AND (%(message_id)s::text IS NULL OR message_id = %(message_id)s::text)
  AND sent_at >= coalesce(now() - %(since_ago)s::interval, %(since)s::timestamptz, '-infinity')
  AND sent_at < coalesce(now() - %(until_ago)s::interval, %(until)s::timestamptz, 'infinity')

-- name: sent
-- Sent messages, newest first. A page begins before both the time and the position of the previous page's last message,
-- because all messages of one transaction have the same time.
-- parameters: bodies boolean (whether to read them), destination text, key text, message_id text, since_ago interval,
--   since timestamptz, until_ago interval, until timestamptz, after bigint (a position), before_at timestamptz, before
--   bigint (a position), limit bigint
-- returns: message_id, position, destination, key, headers, published_at, sent_at, size, body
SELECT message_id, position, destination, key, headers, {{microseconds(published_at)}} AS published_at,
  {{microseconds(sent_at)}} AS sent_at, octet_length(body) AS size, CASE WHEN %(bodies)s THEN body END AS body
FROM {{outbox_sent}} AS kept WHERE {{wanted}} AND position > %(after)s
  AND (sent_at, position) < (coalesce(%(before_at)s::timestamptz, 'infinity'), coalesce(%(before)s::bigint, 0))
ORDER BY kept.sent_at DESC, position DESC LIMIT %(limit)s

-- name: is_any_kept
-- Whether any sent message is kept.
-- parameters: none
-- returns: a boolean
SELECT EXISTS (SELECT FROM {{outbox_sent}})

-- name: plan_by_values
-- Plan later statements of this transaction for their parameters: filters that are null cost nothing, and the others
-- use their index.
-- parameters: none
-- returns: the setting
SELECT set_config('plan_cache_mode', 'force_custom_plan', true)

-- name: replay_plan
-- The chunks of a replay. Of the messages sent to one destination under one id, the first is taken, before positions
-- are compared: a replay that continues leaves out what it had sent before. Positions and times nearly agree, so each
-- chunk is read by its times; that needs no index on positions, for which every send would pay.
-- parameters: chunk_messages bigint, destination text, key text, message_id text, since_ago interval, since
--   timestamptz, until_ago interval, until timestamptz, after bigint (a position)
-- returns: in order: messages, copies (of them that are left out), positions and times between which they lie, times
--   between which all of the filter's lie
SELECT count(*) AS messages, sum(copies)::bigint AS copies, min(position) AS first, max(position) AS last,
  {{microseconds(min(sent_at))}} AS sent_from, {{microseconds(max(sent_at))}} AS sent_to,
  {{microseconds(min(since))}} AS since, {{microseconds(max(until))}} AS until
FROM (
  SELECT found.*, (row_number() OVER (ORDER BY position) - 1) / %(chunk_messages)s AS chunk
  FROM (
    SELECT position, sent_at, min(position) OVER same AS first, count(*) OVER same - 1 AS copies,
      min(sent_at) OVER () AS since, max(sent_at) OVER () AS until
    FROM {{outbox_sent}} WHERE {{wanted}} WINDOW same AS (PARTITION BY message_id, destination)
  ) AS found
  WHERE position = first AND position > %(after)s
) AS numbered
GROUP BY chunk ORDER BY chunk

-- name: replay_chunk
-- One chunk of a replay, without the copies among its messages.
-- parameters: sent_from timestamptz, sent_to timestamptz, first bigint, last bigint, destination text, key text,
--   message_id text, since_ago interval, since timestamptz, until_ago interval, until timestamptz, plan_since
--   timestamptz, plan_until timestamptz
-- returns: message_id, destination, key, headers, body, position; in the order of positions
SELECT message_id, destination, key, headers, body, position FROM {{outbox_sent}} AS kept
WHERE sent_at BETWEEN %(sent_from)s AND %(sent_to)s AND position BETWEEN %(first)s AND %(last)s AND {{wanted}}
  AND NOT EXISTS (
    SELECT FROM {{outbox_sent}} AS earlier
    WHERE earlier.message_id = kept.message_id AND earlier.position < kept.position
      AND earlier.destination = kept.destination AND (%(key)s::text IS NULL OR earlier.key = %(key)s::text)
      AND earlier.sent_at BETWEEN %(plan_since)s AND %(plan_until)s
  )
ORDER BY position

-- Only what every archive has.
-- fragment: forgettable
sent_at < least(
    now() - %(keep_sent)s::interval,
    (SELECT min(coalesce(lake.archived_upto, '-infinity')) FROM {{archive}} AS lake)
  )

-- name: purge_sent
-- Delete some messages that were sent longer ago than this.
-- parameters: keep_sent interval, limit bigint
-- returns: nothing; the row count says how many
WITH old AS MATERIALIZED (
  SELECT message_id, position FROM {{outbox_sent}} WHERE {{forgettable}}
  ORDER BY sent_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
DELETE FROM {{outbox_sent}} AS kept USING old WHERE kept.message_id = old.message_id AND kept.position = old.position

-- name: count_old_sent
-- How many messages were sent longer ago than this.
-- parameters: keep_sent interval, limit bigint
-- returns: messages, at most so many
SELECT count(*) FROM (
  SELECT FROM {{outbox_sent}} WHERE {{forgettable}} LIMIT %(limit)s
) AS bounded
