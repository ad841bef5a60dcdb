-- What people have done.

-- name: note_action
-- Record an action.
-- parameters: actor text, action text, target text, detail text (JSON)
-- returns: nothing
INSERT INTO {{operator_action}} (actor, action, target, detail)
VALUES (%(actor)s, %(action)s, %(target)s, %(detail)s::jsonb)

-- name: last_actions
-- The last actions, the newest first.
-- parameters: kinds text[] (null: all), without text[] (kinds that are left out), limit bigint
-- returns: the columns of OperatorAction
SELECT action_id, {{microseconds(acted_at)}} AS acted_at, actor, action, target, detail
FROM {{operator_action}} AS done
WHERE (%(kinds)s::text[] IS NULL OR action = ANY(%(kinds)s::text[])) AND action <> ALL(%(without)s::text[])
ORDER BY action_id DESC LIMIT %(limit)s
