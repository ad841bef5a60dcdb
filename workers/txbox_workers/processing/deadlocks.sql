-- Count deadlocks and serialization failures of handlers, for the status.

-- name: count_conflicts
-- Count transactions that the database rolled back in favour of others.
-- parameters: subscriber_id text, sqlstate text, relation text, conflicts bigint
-- returns: nothing
INSERT INTO {{handler_conflict}} AS counted (subscriber_id, sqlstate, relation, conflicts)
VALUES (%(subscriber_id)s, %(sqlstate)s, %(relation)s, %(conflicts)s)
ON CONFLICT (subscriber_id, sqlstate, relation) DO UPDATE
SET conflicts = counted.conflicts + excluded.conflicts, last_at = now()
