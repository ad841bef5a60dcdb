-- What bounds the reads of a page.

-- name: bound_time
-- Bound the time of every later statement of this transaction, and its waits for locks; compile none of them, which
-- takes longer than they do. One from which row-level security would hide rows fails: a page must not say that there
-- are none.
-- parameters: milliseconds text, lock_milliseconds text
-- returns: the settings
SELECT set_config('statement_timeout', %(milliseconds)s, true),
  set_config('lock_timeout', %(lock_milliseconds)s, true), set_config('jit', 'off', true),
  set_config('row_security', 'off', true)
