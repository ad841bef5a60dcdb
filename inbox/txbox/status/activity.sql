-- What workers and relays did in the last hours, by their reports.

-- fragment: stretches
SELECT one.name, act.figure,
  (floor(extract(epoch FROM act.minute) / %(seconds)s::int) - floor(extract(epoch FROM now()) / %(seconds)s::int))::int AS stretch,
  sum(act.count)::bigint AS count
FROM one CROSS JOIN LATERAL (
  SELECT minute, figure, count FROM {{reported_activity}} AS act
  WHERE act.kind = %(kind)s AND act.name = one.name
    AND act.minute >= to_timestamp((floor(extract(epoch FROM now()) / %(seconds)s::int) - %(stretches)s::int + 1) * %(seconds)s::int)
) AS act
GROUP BY one.name, act.figure, stretch ORDER BY one.name, act.figure, stretch

-- name: newest_stretch
-- When the newest stretch began. Stretches begin at multiples of their length, so they stay where they are.
-- parameters: seconds int (of a stretch)
-- returns: seconds since 1970
SELECT (floor(extract(epoch FROM now()) / %(seconds)s::int) * %(seconds)s::int)::bigint

-- name: activity_of_one
-- The sums of each figure of one name over stretches of time; a stretch without any has no row.
-- parameters: kind text, name text, seconds int (of a stretch), stretches int (the newest ones)
-- returns: name, figure, stretch (0 is the newest, -1 the one before), count
WITH one AS (SELECT %(name)s::text COLLATE "C" AS name)
{{stretches}}

-- name: activity_of_all
-- The same of all names. The names are found by jumping along the key: of a week, only the last hours are read.
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
