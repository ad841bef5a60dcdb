"""The demo: a chain of services whose processes are killed everywhere, counted to the cent.

::

    shop ───────────────→ relay → SQS → billing ──────────────→ relay → SQS → notification
    order and outbox,                   inbox, account and                   lease and
    one transaction                     outbox, one transaction              e-mail → SMTP server, which keeps it

With ``postgres`` there are no relays and no SQS: billing and notification take their messages from the outbox itself.
"""
