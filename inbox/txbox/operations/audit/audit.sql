-- The audit: what was sent, against what is in the inbox. Every statement reads a bounded number of rows and writes
-- nothing, so all of them also run on a replica.
--
-- A stretch is a range of message ids: above "after", up to "upto". Both sides have an index that begins with the id.
-- It is compared in buckets, by the last bits of each id's hash; only buckets that differ are listed.

-- fragment: hash
-- 64 bits of an id, different in each process: nobody can choose ids that cancel each other out. It takes a thirtieth
-- of the time of SHA-256. All versions of PostgreSQL so far return the same; none promises it. If two servers differ,
-- every id is listed: the audit takes longer, and finds the same.
--
-- Hashes are added up as numbers without limit, so the order does not matter. Two different sets of ids have the same
-- count and the same sum with a chance of 2**-54.
hashtextextended(message_id, %(seed)s)

-- fragment: bucket
({{hash}} & 1023)

-- fragment: sent_ids
-- The ids of a stretch that were sent. The inbox may have forgotten the rows of those sent long ago.
SELECT message_id, count(*) AS copies, count(DISTINCT destination) AS destinations, max(kept.sent_at) AS sent_at,
  max(kept.sent_at) >= %(judged_since)s AS judged
FROM {{outbox_sent}} AS kept
WHERE message_id > %(after)s AND message_id <= %(upto)s AND destination = ANY(%(destinations)s::text[])
GROUP BY message_id

-- fragment: state
-- What became of a message, by its row in the inbox and its letter. Both change in one transaction, and so agree in one
-- snapshot. A letter that was discarded and then forgotten has left the number 0.
CASE WHEN entry.dead_letter_id IS NULL THEN 'processed' WHEN entry.dead_letter_id = 0 THEN 'discarded' ELSE coalesce((
    SELECT CASE WHEN letter.redriven_at IS NOT NULL THEN 'unparked'
      WHEN letter.discarded_at IS NOT NULL THEN 'discarded' WHEN letter.reason = 'expired' THEN 'expired' ELSE 'parked' END
    FROM {{dead_letter}} AS letter
    WHERE letter.dead_letter_id = entry.dead_letter_id AND letter.subscriber_id = entry.subscriber_id
      AND letter.message_id = entry.message_id
  ), 'unparked') END

-- fragment: recorded_ids
-- The ids of a stretch in the inbox, each with its state. If there is only a ledger, its completed leases are the
-- inbox. What was processed before the first kept message was sent, was not sent by anything that is kept.
SELECT entry.*, {{state}} AS state
FROM (
  SELECT subscriber_id, message_id, count(*) FILTER (WHERE in_inbox) AS copies, max(dead_letter_id) AS dead_letter_id,
    min(processed_at) AS processed_at, min(processed_at) >= %(judged_since)s AS judged
  FROM (
    SELECT subscriber_id, message_id, processed_at, dead_letter_id, true AS in_inbox FROM {{processed_message}}
    UNION ALL
    SELECT subscriber_id, message_id, completed_at, NULL, false FROM {{message_lease}} WHERE completed_at IS NOT NULL
  ) AS recorded
  WHERE subscriber_id = %(subscriber_id)s AND message_id > %(after)s AND message_id <= %(upto)s
  GROUP BY subscriber_id, message_id
) AS entry

-- name: limit_statement
-- Read-only, limited in time, and planned for the values.
-- parameters: statement_timeout text
-- returns: the settings
SELECT set_config('transaction_read_only', 'on', true), set_config('statement_timeout', %(statement_timeout)s, true),
  set_config('plan_cache_mode', 'force_custom_plan', true)

-- name: outbox_begin
-- Where an audit begins at the outbox. No id is greater than its greatest one.
-- parameters: destinations text[], relays text[] (the subscribers of the relays' dead letters), counted bigint
-- returns: now, kept_since (null: nothing is kept), last_id, waiting, undelivered
SELECT {{microseconds(clock_timestamp())}} AS now,
  (SELECT {{microseconds(min(kept.sent_at))}} FROM {{outbox_sent}} AS kept) AS kept_since,
  (SELECT max(message_id) FROM {{outbox_sent}}) AS last_id,
  (SELECT count(*) FROM (SELECT destination FROM {{outbox_message}} LIMIT %(counted)s) AS looked_at
    WHERE destination = ANY(%(destinations)s::text[])) AS waiting,
  (SELECT count(*) FROM {{dead_letter}} WHERE subscriber_id = ANY(%(relays)s::text[])
    AND redriven_at IS NULL AND discarded_at IS NULL) AS undelivered

-- name: kept_since
-- When the first kept message was sent.
-- parameters: none
-- returns: kept_since (null: nothing is kept)
SELECT {{microseconds(min(kept.sent_at))}} AS kept_since FROM {{outbox_sent}} AS kept

-- name: inbox_begin
-- Where an audit begins at the inbox. What was sent shortly before a pause, or later, is in flight.
-- parameters: subscriber_id text
-- returns: now, horizon (null: nothing is forgotten), paused_at (null: it is not paused), last_id
SELECT {{microseconds(clock_timestamp())}} AS now,
  (SELECT {{microseconds(horizon)}} FROM {{inbox_horizon}} WHERE subscriber_id = %(subscriber_id)s) AS horizon,
  (SELECT {{microseconds(paused_at)}} FROM {{paused}} WHERE kind = 'subscriber' AND name = %(subscriber_id)s)
    AS paused_at,
  greatest(
    (SELECT max(message_id) FROM {{processed_message}} WHERE subscriber_id = %(subscriber_id)s),
    (SELECT max(message_id) FROM {{message_lease}} WHERE subscriber_id = %(subscriber_id)s)
  ) AS last_id

-- name: next_subscriber
-- The next subscriber after this one, of those with rows in the inbox or waiting letters.
-- parameters: after text, relay text (what the subscribers of relays' dead letters start with)
-- returns: subscriber_id, or null
SELECT least(
  (SELECT min(subscriber_id) FROM {{processed_message}} WHERE subscriber_id > %(after)s),
  (SELECT min(subscriber_id) FROM {{message_lease}} WHERE subscriber_id > %(after)s),
  (SELECT min(subscriber_id) FROM {{dead_letter}} WHERE subscriber_id > %(after)s
    AND NOT starts_with(subscriber_id, %(relay)s))
)

-- name: sent_edge
-- The last id of a stretch of that many sent messages, to any destination.
-- parameters: after text, upto text, rows bigint
-- returns: message_id; no row if there are fewer
SELECT message_id FROM {{outbox_sent}} WHERE message_id > %(after)s AND message_id <= %(upto)s
ORDER BY message_id OFFSET %(rows)s - 1 LIMIT 1

-- name: recorded_edge
-- The last id of a stretch of that many rows of the inbox. Each part has a limit; otherwise the planner would sort
-- everything behind "after".
-- parameters: subscriber_id text, after text, upto text, rows bigint
-- returns: message_id; no row if there are fewer
SELECT message_id FROM (
  (SELECT message_id FROM {{processed_message}}
    WHERE subscriber_id = %(subscriber_id)s AND message_id > %(after)s AND message_id <= %(upto)s
    ORDER BY message_id LIMIT %(rows)s)
  UNION ALL
  (SELECT message_id FROM {{message_lease}}
    WHERE subscriber_id = %(subscriber_id)s AND message_id > %(after)s AND message_id <= %(upto)s
    ORDER BY message_id LIMIT %(rows)s)
) AS entry ORDER BY message_id OFFSET %(rows)s - 1 LIMIT 1

-- name: sent_digests
-- Counts and digest of what was sent, for each bucket.
-- parameters: after text, upto text, destinations text[], judged_since timestamptz, seed bigint
-- returns: bucket; ids and digest (of those that are judged), forgotten, sent_again
SELECT {{bucket}} AS bucket, count(*) FILTER (WHERE judged) AS ids,
  coalesce(sum({{hash}}) FILTER (WHERE judged), 0) AS digest,
  count(*) FILTER (WHERE NOT judged) AS forgotten, sum(copies - destinations)::bigint AS sent_again
FROM ({{sent_ids}}) AS sent GROUP BY bucket

-- name: recorded_digests
-- Counts and digest of what is in the inbox, for each bucket.
-- parameters: subscriber_id text, after text, upto text, judged_since timestamptz, seed bigint
-- returns: bucket; ids and digest (of those that are judged), and by state: processed, parked, expired, discarded;
--   not_kept, doubled, unparked
SELECT {{bucket}} AS bucket, count(*) FILTER (WHERE judged) AS ids,
  coalesce(sum({{hash}}) FILTER (WHERE judged), 0) AS digest,
  count(*) FILTER (WHERE judged AND state = 'processed') AS processed,
  count(*) FILTER (WHERE judged AND state = 'parked') AS parked,
  count(*) FILTER (WHERE judged AND state = 'expired') AS expired,
  count(*) FILTER (WHERE judged AND state = 'discarded') AS discarded,
  count(*) FILTER (WHERE NOT judged) AS not_kept, count(*) FILTER (WHERE copies > 1) AS doubled,
  count(*) FILTER (WHERE state = 'unparked') AS unparked
FROM ({{recorded_ids}}) AS recorded GROUP BY bucket

-- name: sent_destinations
-- Those of these destinations to which something was sent that can be judged.
-- parameters: after text, upto text, destinations text[], judged_since timestamptz
-- returns: destination
SELECT DISTINCT destination FROM {{outbox_sent}} AS kept
WHERE message_id > %(after)s AND message_id <= %(upto)s AND destination = ANY(%(destinations)s::text[])
  AND kept.sent_at >= %(judged_since)s

-- name: sent_list
-- The ids of some buckets that were sent.
-- parameters: after text, upto text, destinations text[], judged_since timestamptz, seed bigint, buckets bigint[]
-- returns: message_id, sent_at, judged, again (whether it was sent more than once)
SELECT message_id, {{microseconds(sent.sent_at)}} AS sent_at, judged, copies > destinations AS again
FROM ({{sent_ids}}) AS sent WHERE {{bucket}} = ANY(%(buckets)s::bigint[])

-- name: recorded_list
-- The ids of some buckets in the inbox.
-- parameters: subscriber_id text, after text, upto text, judged_since timestamptz, seed bigint, buckets bigint[]
-- returns: message_id, processed_at, judged, state, doubled
SELECT message_id, {{microseconds(recorded.processed_at)}} AS processed_at, judged, state, copies > 1 AS doubled
FROM ({{recorded_ids}}) AS recorded WHERE {{bucket}} = ANY(%(buckets)s::bigint[])

-- name: judge_missing
-- What became of ids that were sent and were not found in the inbox, in one snapshot. A message that has failed, or was
-- worked on, comes again after a pause, unless its subscriber is paused; then it is as much in flight as one that was
-- just sent. A message that has not come since is overdue: a failure, or a lease that has run out, does not show that
-- the queue still has it. After two weeks the queue does not: SQS keeps none longer. A letter of a mismatch has a
-- different body than the one looked for.
-- parameters: subscriber_id text, message_ids text[], in_flight interval, retry interval (the longest pause)
-- returns: message_id, state
SELECT wanted.message_id, coalesce(
    (SELECT {{state}} FROM {{processed_message}} AS entry
      WHERE entry.subscriber_id = %(subscriber_id)s AND entry.message_id = wanted.message_id LIMIT 1),
    CASE WHEN lease.completed_at IS NOT NULL THEN 'processed' WHEN letters.expired THEN 'expired'
      WHEN letters.waiting THEN 'parked'
      WHEN letters.redriven_at > limits.in_flight_since THEN 'in_flight'
      WHEN tried.at > greatest(limits.in_flight_since - %(retry)s::interval, limits.kept_since) THEN 'retrying'
      WHEN letters.discarded THEN 'discarded' WHEN tried.at > limits.kept_since THEN 'overdue' ELSE 'missing' END
  ) AS state
FROM unnest(%(message_ids)s::text[]) AS wanted (message_id)
CROSS JOIN (
  SELECT clock_timestamp() - interval '14 days' AS kept_since,
    least(clock_timestamp(), (SELECT paused_at FROM {{paused}} WHERE kind = 'subscriber' AND name = %(subscriber_id)s))
      - %(in_flight)s::interval AS in_flight_since
) AS limits
LEFT JOIN {{message_lease}} AS lease
  ON lease.subscriber_id = %(subscriber_id)s AND lease.message_id = wanted.message_id
LEFT JOIN {{message_failure}} AS failure
  ON failure.subscriber_id = %(subscriber_id)s AND failure.message_id = wanted.message_id
CROSS JOIN LATERAL (SELECT greatest(failure.last_failed_at, lease.expires_at, lease.acquired_at) AS at) AS tried
CROSS JOIN LATERAL (
  SELECT bool_or({{open}} AND letter.reason = 'expired') AS expired, bool_or({{open}}) AS waiting,
    bool_or(letter.discarded_at IS NOT NULL) AS discarded, max(letter.redriven_at) AS redriven_at
  FROM {{dead_letter}} AS letter
  WHERE letter.subscriber_id = %(subscriber_id)s AND letter.message_id = wanted.message_id
    AND letter.reason <> 'mismatch'
) AS letters

-- name: first_parked
-- When messages were first parked: those that were redriven were sent before that.
-- parameters: subscriber_id text, message_ids text[]
-- returns: message_id, parked_at
SELECT message_id, {{microseconds(min(letter.parked_at))}} AS parked_at FROM {{dead_letter}} AS letter
WHERE subscriber_id = %(subscriber_id)s AND message_id = ANY(%(message_ids)s::text[]) GROUP BY message_id

-- name: judge_foreign
-- Those of these ids that this outbox has sent or parked.
-- parameters: message_ids text[], destinations text[], relays text[]
-- returns: message_id, here (whether to one of these destinations)
SELECT sent.message_id, bool_or(sent.destination = ANY(%(destinations)s::text[])) AS here
FROM {{outbox_sent}} AS sent JOIN unnest(%(message_ids)s::text[]) AS wanted (message_id) USING (message_id)
GROUP BY sent.message_id
UNION ALL
SELECT DISTINCT letter.message_id, true FROM {{dead_letter}} AS letter
WHERE letter.subscriber_id = ANY(%(relays)s::text[]) AND letter.message_id = ANY(%(message_ids)s::text[])

-- name: find_waiting
-- Those of these ids that are in one part of the outbox. It has no index on ids, so it is read in the order of its key.
-- parameters: message_ids text[], lane bigint, position bigint (of the last one of the part before), rows bigint
-- returns: found text[], lane and position of the last one (null: there was none)
WITH part AS MATERIALIZED (
  SELECT lane, position, message_id FROM {{outbox_message}}
  WHERE (lane, position) > (%(lane)s, %(position)s) ORDER BY lane, position LIMIT %(rows)s
)
SELECT ARRAY(SELECT message_id FROM part JOIN unnest(%(message_ids)s::text[]) AS wanted (message_id) USING (message_id))
  AS found, last.lane, last.position
FROM (SELECT) AS once LEFT JOIN (SELECT lane, position FROM part ORDER BY lane DESC, position DESC LIMIT 1) AS last
  ON true

-- name: judge_letters
-- Letters of a subscriber that wait, and whose message the inbox does not show as parked by them, in one part of them.
-- Letters of a mismatch do not say what became of their id. A letter of a ledger alone has no row in the inbox. The
-- inbox may have forgotten the row of a letter that was parked before the horizon.
-- parameters: subscriber_id text, after bigint (a letter), rows bigint
-- returns: last (the last letter of the part, null: there was none), kinds text[], message_ids text[], at bigint[]
WITH part AS MATERIALIZED (
  SELECT letter.dead_letter_id, letter.subscriber_id, letter.message_id, letter.reason, letter.lease_attempts,
    letter.parked_at
  FROM {{dead_letter}} AS letter
  WHERE letter.subscriber_id = %(subscriber_id)s AND letter.dead_letter_id > %(after)s AND {{open}}
  ORDER BY letter.dead_letter_id LIMIT %(rows)s
), judged AS (
  SELECT letter.*, CASE
      WHEN {{processed_since}} THEN 'processed_since'
      WHEN recorded.message_id IS NOT NULL AND recorded.dead_letter_id = letter.dead_letter_id THEN NULL
      WHEN recorded.message_id IS NULL AND letter.lease_attempts IS NOT NULL THEN NULL
      WHEN recorded.message_id IS NULL AND letter.parked_at < horizon.horizon THEN NULL
      ELSE 'unrecorded'
    END AS kind
  FROM part AS letter
  LEFT JOIN {{processed_message}} AS recorded
    ON recorded.subscriber_id = letter.subscriber_id AND recorded.message_id = letter.message_id
  LEFT JOIN {{inbox_horizon}} AS horizon ON horizon.subscriber_id = letter.subscriber_id
  WHERE letter.reason <> 'mismatch'
)
SELECT (SELECT max(dead_letter_id) FROM part) AS last, array_agg(kind ORDER BY dead_letter_id) AS kinds,
  array_agg(message_id ORDER BY dead_letter_id) AS message_ids,
  array_agg({{microseconds(parked_at)}} ORDER BY dead_letter_id) AS at
FROM judged WHERE kind IS NOT NULL
