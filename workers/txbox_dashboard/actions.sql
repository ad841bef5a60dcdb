-- What people have done from the dashboard.

-- name: note_action
-- Put an action on record.
-- parameters: actor text, action text, target text, detail text (JSON)
-- returns: nothing
INSERT INTO {{operator_action}} (actor, action, target, detail)
VALUES (%(actor)s, %(action)s, %(target)s, %(detail)s::jsonb)

-- name: last_actions
-- The last actions.
-- parameters: most int
-- returns: action_id, acted_at, actor, action, target, detail
SELECT action_id, {{microseconds(acted_at)}} AS acted_at, actor, action, target, detail
FROM {{operator_action}} AS done ORDER BY action_id DESC LIMIT %(most)s
