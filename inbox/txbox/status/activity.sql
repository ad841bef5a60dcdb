-- What workers and relays did in the last hours, by their reports.

-- fragment: this_stretch
date_bin(make_interval(secs => %(seconds)s::int), now(), 'epoch')

-- fragment: stretches
, binned AS (
  SELECT one.name, act.figure, act.begins_at, sum(act.count) AS count
  FROM one CROSS JOIN LATERAL (
    SELECT date_bin(make_interval(secs => %(seconds)s::int), act.minute, 'epoch') AS begins_at, act.figure, act.count
    FROM {{reported_activity}} AS act
    WHERE act.kind = %(kind)s AND act.name = one.name
      AND act.minute >= {{this_stretch}} - make_interval(secs => %(seconds)s::int * (%(stretches)s::int - 1))
  ) AS act
  GROUP BY one.name, act.figure, act.begins_at
)
SELECT name, figure, (extract(epoch FROM begins_at - {{this_stretch}}) / %(seconds)s::int)::int AS stretch, count::bigint
FROM binned ORDER BY name, figure, stretch

-- name: newest_stretch
-- When the newest stretch began. Stretches begin at multiples of their length, so they do not shift.
-- parameters: seconds int (of a stretch)
-- returns: seconds since 1970
SELECT extract(epoch FROM {{this_stretch}})::bigint

-- name: activity_of_one
-- The sums of each figure of one name over stretches of time; an empty stretch has no row.
-- parameters: kind text, name text, seconds int (of a stretch), stretches int (the newest ones)
-- returns: name, figure, stretch (0 is the newest, -1 the one before), count
WITH one AS (SELECT %(name)s::text COLLATE "C" AS name)
{{stretches}}

-- name: activity_of_all
-- The same for all names. The names are found by jumping along the key: of a week, only the last hours are read.
-- parameters: kind text, seconds int, stretches int
-- returns: as activity_of_one
WITH RECURSIVE one AS (
  (SELECT name FROM {{reported_activity}} WHERE kind = %(kind)s ORDER BY name LIMIT 1)
  UNION ALL
  SELECT next.name FROM one CROSS JOIN LATERAL (
    SELECT later.name FROM {{reported_activity}} AS later WHERE later.kind = %(kind)s AND later.name > one.name
    ORDER BY later.name LIMIT 1
  ) AS next
)
{{stretches}}
