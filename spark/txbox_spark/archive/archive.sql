-- How far an archive reaches, and what goes into it.

-- name: begin
-- Begin an archive unless it exists. From now on, nothing is forgotten that it does not have.
-- parameters: location text, archive_id text
-- returns: nothing
INSERT INTO {{archive}} (location, archive_id) VALUES (%(location)s, %(archive_id)s) ON CONFLICT DO NOTHING

-- name: abandon
-- Forget an archive that was begun but is empty, because its folder cannot be used.
-- parameters: location text, archive_id text
-- returns: nothing
DELETE FROM {{archive}}
WHERE location = %(location)s AND archive_id = %(archive_id)s AND archived_upto IS NULL AND pending IS NULL

-- name: read
-- Return an archive's state.
-- parameters: location text
-- returns: archive_id, archived_upto (null: it is empty), pending (null: no days are being moved into place); no row if
--   the archive was not begun
SELECT archive_id, {{microseconds(archived_upto)}} AS archived_upto, pending FROM {{archive}} AS lake
WHERE location = %(location)s

-- name: cutoff
-- Return the end of the last day that has been over for this long.
-- parameters: settle interval
-- returns: cutoff
SELECT {{microseconds(settled.cutoff)}} FROM (
  SELECT date_trunc('day', (clock_timestamp() - %(settle)s::interval) AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AS cutoff
) AS settled

-- name: unsettled
-- Return the transactions that may still write rows of days before a time: those that began before it, those whose start
-- this role may not see, and prepared ones. VACUUM is left out, because it writes none of our rows.
-- parameters: cutoff timestamptz
-- returns: name (of a transaction), who (holds it)
SELECT lock.virtualtransaction AS name, 'server process ' || lock.pid
  || CASE WHEN activity.xact_start IS NULL THEN ' (with pg_read_all_stats this role sees when it began)' ELSE '' END AS who
FROM pg_locks AS lock JOIN pg_stat_activity AS activity ON activity.pid = lock.pid
WHERE lock.locktype = 'virtualxid' AND lock.granted AND lock.pid <> pg_backend_pid()
  AND activity.datname = current_database() AND coalesce(activity.xact_start < %(cutoff)s, true)
  AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum AS vacuum WHERE vacuum.pid = lock.pid)
UNION ALL
SELECT transaction::text, 'the prepared transaction ' || gid FROM pg_prepared_xacts
WHERE database = current_database()

-- name: still_unsettled
-- Return which of these transactions have not ended.
-- parameters: names text[]
-- returns: name
SELECT virtualtransaction AS name FROM pg_locks
WHERE locktype = 'virtualxid' AND granted AND virtualtransaction = ANY(%(names)s::text[])
UNION ALL
SELECT transaction::text FROM pg_prepared_xacts
WHERE database = current_database() AND transaction::text = ANY(%(names)s::text[])

-- name: count_sent
-- Count what was sent in each hour. Postgres knows the length of a body without reading it.
-- parameters: first timestamptz, beyond timestamptz
-- returns: hour, rows, widest (bytes of the widest row)
SELECT {{microseconds(hours.hour)}} AS hour, rows, widest FROM (
  SELECT date_trunc('hour', sent_at AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AS hour, count(*) AS rows,
    max(octet_length(body) + pg_column_size(headers)) AS widest
  FROM {{outbox_sent}} WHERE sent_at >= %(first)s AND sent_at < %(beyond)s GROUP BY hour
) AS hours ORDER BY hour

-- name: count_processed
-- Count what was processed on each day: rows that no longer change. A parked message's row is removed by a redrive.
-- parameters: first timestamptz, beyond timestamptz
-- returns: day (as in the names of folders), rows
SELECT to_char(processed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD') AS day, count(*) AS rows FROM (
  SELECT processed_at FROM {{processed_message}} WHERE dead_letter_id IS NULL
  UNION ALL
  SELECT completed_at FROM {{message_lease}} WHERE completed_at IS NOT NULL
) AS processed
WHERE processed_at >= %(first)s AND processed_at < %(beyond)s GROUP BY day

-- name: propose
-- Record which days go into the archive next; their files are written. Of two runs at the same time, one is first.
-- parameters: location text, archive_id text, first timestamptz (null: the beginning), pending jsonb
-- returns: nothing; the count of rows is 0 if another run was first
UPDATE {{archive}} SET pending = %(pending)s::jsonb
WHERE location = %(location)s AND archive_id = %(archive_id)s AND pending IS NULL
  AND archived_upto IS NOT DISTINCT FROM %(first)s::timestamptz

-- name: finish
-- Record that these days are in place. From now on, they may be forgotten.
-- parameters: location text, archive_id text, run text, beyond timestamptz
-- returns: nothing; the count of rows is 0 if another run has recorded it
UPDATE {{archive}} SET archived_upto = %(beyond)s, pending = NULL, archived_at = now()
WHERE location = %(location)s AND archive_id = %(archive_id)s AND pending ->> 'run' = %(run)s

-- name: release
-- Forget an archive, so that what it does not have may be forgotten, too.
-- parameters: location text
-- returns: nothing; the count of rows
DELETE FROM {{archive}} WHERE location = %(location)s

-- name: inbox_bytes
-- Return the size of the inbox on disk, in generations or as one table.
-- parameters: none
-- returns: bytes
SELECT coalesce(
  (SELECT sum(pg_relation_size(relid)) FROM pg_partition_tree('{{literal(processed_message)}}'))::bigint,
  pg_relation_size('{{literal(processed_message)}}'))

-- name: cut_inbox
-- Return keys that cut the inbox evenly, by a sample of its blocks.
-- parameters: percent real, parts bigint
-- returns: subscriber_id, message_id; in order
SELECT DISTINCT ON (part) subscriber_id, message_id FROM (
  SELECT subscriber_id, message_id, ntile(%(parts)s::int) OVER (ORDER BY subscriber_id, message_id) AS part
  FROM {{processed_message}} TABLESAMPLE SYSTEM (%(percent)s::real)
) AS sampled
WHERE part > 1 ORDER BY part, subscriber_id, message_id

-- The statements that Spark reads over JDBC. It binds no parameters, so it wraps them in conditions on these columns.

-- name: rows_sent
-- Return what was sent, with the day.
-- parameters: none
-- returns: the columns of SENT_COLUMNS in their order, and day
SELECT message_id, position, destination, key, headers::text AS headers, body, published_at, sent_at,
  to_char(sent_at AT TIME ZONE 'UTC', 'YYYY-MM-DD') AS day
FROM {{outbox_sent}}

-- name: rows_processed
-- Return what is in the inbox, with the day. If there is only a ledger, its completed leases are the inbox.
-- parameters: none
-- returns: the columns of PROCESSED_COLUMNS in their order, and day
SELECT entry.subscriber_id, entry.message_id, entry.processed_at, {{state}} AS state, entry.fingerprint,
  to_char(entry.processed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD') AS day
FROM (
  SELECT subscriber_id, message_id, processed_at, fingerprint, dead_letter_id FROM {{processed_message}}
  UNION ALL
  SELECT subscriber_id, message_id, completed_at, fingerprint, NULL FROM {{message_lease}} WHERE completed_at IS NOT NULL
) AS entry
