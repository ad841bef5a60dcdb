"""The SQL statement of the functions on Lambda: named, pure. Values are bound (``%s`` is psycopg's placeholder)."""

__all__ = ["LIMITS", "LIMIT_TRANSACTION"]

LIMITS = ["transaction_timeout", "idle_in_transaction_session_timeout"]
"""What ends a transaction that its client has left alone: since PostgreSQL 17 whatever it is doing, before that if it
waits for its client."""

LIMIT_TRANSACTION = """
SELECT set_config(setting, %s || 'ms', true)
FROM unnest(%s::text[]) AS setting
WHERE current_setting(setting, true)::interval = interval '0'
   OR current_setting(setting, true)::interval > make_interval(secs => %s / 1000.0)"""
"""Have the server end this transaction after so long: (milliseconds as text, settings, milliseconds as a number).

A setting that the host has made stricter stays, and one that this server does not know is null, so it is left alone."""
