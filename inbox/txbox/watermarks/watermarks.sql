-- The watermarks: the highest sequence of each aggregate. The statements that may wait have three things in common:
--
-- - txbox_bound sets our lock_timeout, and the outer SELECT restores the old one last, as in record_one.
-- - An event that the statement's own snapshot shows to be stale takes no lock, does not wait and writes nothing. A
--   watermark only rises, so what is stale in an older snapshot is stale.
-- - Aggregates are inserted in one order, that of their bytes, whether or not their rows exist. Statements that overlap
--   wait for each other in that order, never in a circle. That is why no statement here first locks the rows that it
--   finds and then inserts the others.
--
-- ON CONFLICT waits for a row of a transaction that has not ended; this wait is limited. At READ COMMITTED, its WHERE
-- is then compared with the newest version of the row. With one snapshot for the transaction, a version that the
-- snapshot cannot see ends in 40001.

-- fragment: bound
-- If lock_timeout is null, the transaction keeps its own.
txbox_bound AS MATERIALIZED (
  SELECT current_setting('lock_timeout') AS before,
    set_config('lock_timeout', coalesce(%(lock_timeout)s::text, current_setting('lock_timeout')), true)
)

-- fragment: restored
set_config('lock_timeout', bound.before, true)

-- fragment: key
subscriber_id = %(subscriber_id)s AND aggregate_type = %(aggregate_type)s AND aggregate_id = %(aggregate_id)s

-- fragment: inserted_event
INSERT INTO {{aggregate_watermark}} AS mark (subscriber_id, aggregate_type, aggregate_id, sequence, sequence_before)
SELECT %(subscriber_id)s::text, %(aggregate_type)s::text, %(aggregate_id)s::text

-- fragment: raise_watermark
ON CONFLICT (subscriber_id, aggregate_type, aggregate_id) DO UPDATE
SET sequence = excluded.sequence, sequence_before = mark.sequence, advanced_at = excluded.advanced_at
WHERE mark.sequence < excluded.sequence

-- fragment: placeholder_mark
-- If there is no watermark, only `first` may make one; but only an INSERT waits for another that is just making one. So
-- any other sequence inserts a placeholder, `first - 1`, which our next statement deletes. Its sequence_before is the
-- highest bigint, from which no watermark can have risen.
9223372036854775807::bigint

-- name: advance
-- Advance one watermark.
-- parameters: lock_timeout text, subscriber_id text, aggregate_type text, aggregate_id text, sequence bigint
-- returns: applied (1, or 0 if it is stale), the lock_timeout that was
WITH {{bound}}, txbox_advanced AS (
  {{inserted_event}}, %(sequence)s::bigint, NULL::bigint FROM txbox_bound
  WHERE NOT EXISTS (SELECT FROM {{aggregate_watermark}} WHERE {{key}} AND sequence >= %(sequence)s::bigint)
  {{raise_watermark}}
  RETURNING sequence
)
SELECT found.applied, {{restored}}
FROM txbox_bound AS bound, (SELECT count(*) AS applied FROM txbox_advanced) AS found

-- name: advance_next
-- Advance one watermark by one.
-- parameters: lock_timeout text, subscriber_id text, aggregate_type text, aggregate_id text, sequence bigint,
--   placeholder bigint or null (null if the sequence is the first one)
-- returns: applied (1 or 0), placed (1 if a placeholder was inserted), the watermark that the snapshot had or null, the
--   lock_timeout that was
WITH {{bound}}, txbox_seen AS MATERIALIZED (
  SELECT sequence FROM {{aggregate_watermark}} WHERE {{key}}
), txbox_advanced AS (
  {{inserted_event}}, coalesce(%(placeholder)s::bigint, %(sequence)s::bigint),
    CASE WHEN %(placeholder)s::bigint IS NOT NULL THEN {{placeholder_mark}} END
  FROM txbox_bound
  WHERE NOT EXISTS (SELECT FROM txbox_seen WHERE sequence >= %(sequence)s::bigint)
  ON CONFLICT (subscriber_id, aggregate_type, aggregate_id) DO UPDATE
  SET sequence = %(sequence)s::bigint, sequence_before = mark.sequence, advanced_at = excluded.advanced_at
  WHERE mark.sequence = %(sequence)s::bigint - 1
  RETURNING sequence_before IS NOT DISTINCT FROM {{placeholder_mark}} AS placed
)
SELECT found.applied, found.placed, (SELECT sequence FROM txbox_seen), {{restored}}
FROM txbox_bound AS bound, (
  SELECT count(*) FILTER (WHERE NOT placed) AS applied, count(*) FILTER (WHERE placed) AS placed FROM txbox_advanced
) AS found

-- name: drop_placeholder
-- Delete a placeholder, so that there is no watermark, as before.
-- parameters: subscriber_id text, aggregate_type text, aggregate_id text
-- returns: nothing
DELETE FROM {{aggregate_watermark}} WHERE {{key}} AND sequence_before = {{placeholder_mark}}

-- name: read_sequence
-- Read a watermark.
-- parameters: subscriber_id text, aggregate_type text, aggregate_id text
-- returns: its sequence; no row if there is none
SELECT sequence FROM {{aggregate_watermark}} WHERE {{key}}

-- fragment: wanted
-- The highest sequence of each aggregate, as they were given.
txbox_wanted AS (
  SELECT * FROM unnest(%(aggregate_types)s::text[], %(aggregate_ids)s::text[], %(sequences)s::bigint[])
    AS wanted (aggregate_type, aggregate_id, sequence)
)

-- fragment: from_wanted
FROM txbox_bound, txbox_wanted AS wanted
WHERE NOT EXISTS (
  SELECT FROM {{aggregate_watermark}} AS seen
  WHERE seen.subscriber_id = %(subscriber_id)s AND seen.aggregate_type = wanted.aggregate_type
    AND seen.aggregate_id = wanted.aggregate_id AND seen.sequence >= wanted.sequence
)
ORDER BY wanted.aggregate_type COLLATE "C", wanted.aggregate_id COLLATE "C"

-- fragment: advanced
txbox_advanced AS (
  INSERT INTO {{aggregate_watermark}} AS mark (subscriber_id, aggregate_type, aggregate_id, sequence)
  SELECT %(subscriber_id)s::text, wanted.aggregate_type, wanted.aggregate_id, wanted.sequence
  {{from_wanted}}
  {{raise_watermark}}
  RETURNING aggregate_type, aggregate_id, sequence_before
)

-- name: advance_many
-- Advance watermarks to the highest sequence of each aggregate.
-- parameters: lock_timeout text, subscriber_id text, aggregate_types text[], aggregate_ids text[], sequences bigint[]
-- returns: of those that rose: types, ids, and sequences before (null if there was none); the lock_timeout that was
WITH {{bound}}, {{wanted}}, {{advanced}}
SELECT found.types, found.ids, found.before, {{restored}}
FROM txbox_bound AS bound, (
  SELECT array_agg(aggregate_type) AS types, array_agg(aggregate_id) AS ids, array_agg(sequence_before) AS before
  FROM txbox_advanced
) AS found

-- name: hold_many
-- Lock watermarks and read their current values; a placeholder stands for a missing one. Aggregates for which every
-- event is stale are left out. DO UPDATE changes nothing here, but only with it does RETURNING have the row: what the
-- snapshot has may be older.
-- parameters: lock_timeout text, subscriber_id text, placeholder bigint, aggregate_types text[], aggregate_ids text[],
--   sequences bigint[] (the highest)
-- returns: types, ids, sequences (null if there was none), the lock_timeout that was
WITH {{bound}}, {{wanted}}, txbox_held AS (
  INSERT INTO {{aggregate_watermark}} AS mark (subscriber_id, aggregate_type, aggregate_id, sequence, sequence_before)
  SELECT %(subscriber_id)s::text, wanted.aggregate_type, wanted.aggregate_id, %(placeholder)s::bigint,
    {{placeholder_mark}}
  {{from_wanted}}
  ON CONFLICT (subscriber_id, aggregate_type, aggregate_id) DO UPDATE SET sequence = mark.sequence
  RETURNING aggregate_type, aggregate_id,
    CASE WHEN sequence_before IS DISTINCT FROM {{placeholder_mark}} THEN sequence END AS sequence
)
SELECT found.types, found.ids, found.sequences, {{restored}}
FROM txbox_bound AS bound, (
  SELECT array_agg(aggregate_type) AS types, array_agg(aggregate_id) AS ids, array_agg(sequence) AS sequences
  FROM txbox_held
) AS found

-- name: settle_many
-- Move watermarks that are held, and delete the placeholders of those that do not move.
-- parameters: subscriber_id text, aggregate_types text[], aggregate_ids text[], befores bigint[] (with nulls),
--   afters bigint[] (null for a placeholder that goes)
-- returns: nothing
WITH txbox_decided AS MATERIALIZED (
  SELECT *
  FROM unnest(%(aggregate_types)s::text[], %(aggregate_ids)s::text[], %(befores)s::bigint[], %(afters)s::bigint[])
    AS decided (aggregate_type, aggregate_id, before, after)
), txbox_moved AS (
  UPDATE {{aggregate_watermark}} AS mark
  SET sequence = decided.after, sequence_before = decided.before, advanced_at = now()
  FROM txbox_decided AS decided
  WHERE mark.subscriber_id = %(subscriber_id)s AND mark.aggregate_type = decided.aggregate_type
    AND mark.aggregate_id = decided.aggregate_id AND decided.after IS NOT NULL
)
DELETE FROM {{aggregate_watermark}} AS mark USING txbox_decided AS decided
WHERE mark.subscriber_id = %(subscriber_id)s AND mark.aggregate_type = decided.aggregate_type
  AND mark.aggregate_id = decided.aggregate_id AND decided.after IS NULL

-- fragment: kept_events
-- For WatermarkStatements.advance_from: advance to the highest sequence of each aggregate in txbox_event, and choose
-- the events that stay. A null sequence makes the inserted one null, which the table refuses: nothing is lost silently.
-- Of two events with the same sequence one is kept; with newest_only, one of all those of an aggregate.
txbox_wanted AS (
  SELECT aggregate_type, aggregate_id, CASE WHEN count(*) = count(sequence) THEN max(sequence) END AS sequence
  FROM txbox_event GROUP BY aggregate_type, aggregate_id
), {{advanced}}, txbox_kept AS MATERIALIZED (
  SELECT DISTINCT ON (
      event.aggregate_type, event.aggregate_id, CASE WHEN NOT %(newest_only)s::bool THEN event.sequence END
    ) event.row_id
  FROM txbox_event AS event JOIN txbox_advanced AS advanced USING (aggregate_type, aggregate_id)
  WHERE advanced.sequence_before IS NULL OR event.sequence > advanced.sequence_before
  ORDER BY event.aggregate_type, event.aggregate_id, CASE WHEN NOT %(newest_only)s::bool THEN event.sequence END,
    event.sequence DESC
)

-- fragment: count_kept
SELECT found.events, {{restored}}
FROM txbox_bound AS bound, (SELECT count(*) AS events FROM txbox_kept) AS found
