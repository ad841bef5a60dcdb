-- The limits of a page's reads.

-- name: bound_time
-- Limit the time of every later statement of this transaction, and its waits for locks. Compile none of them: that
-- takes longer than they do. A statement fails if row-level security would hide rows from it: a page must not say that
-- there are none.
-- parameters: milliseconds text, lock_milliseconds text
-- returns: the settings
SELECT set_config('statement_timeout', %(milliseconds)s, true),
  set_config('lock_timeout', %(lock_milliseconds)s, true), set_config('jit', 'off', true),
  set_config('row_security', 'off', true)
