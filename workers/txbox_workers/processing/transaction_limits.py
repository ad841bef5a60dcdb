"""Limits of transactions: how long a worker keeps its locks that is suspended, or ends without closing its connection.

A process that is stopped (SIGSTOP, a frozen sandbox of Lambda, a suspended machine) leaves its connection open, and the
server waits for it. Its transaction keeps its locks, those on the inbox's rows first of all, which every redelivery
runs into::

    worker        BEGIN ── record m1 ── handler … stopped
    Postgres      ├──────── m1 is locked ────────────────────────────────────── until TCP notices, hours later
    redelivery                                          record m1: in flight … in flight … the queue's dead letters

So each transaction tells the server how long it may take, and the server ends what is then still open.
"""

from collections.abc import Callable

from sqlalchemy import Connection, Engine, event

from txbox.postgres.round_trip import Statement, Step
from txbox_workers.processing.outage_errors import bookkeeping

TimeLimit = Callable[[], float | None]
"""Says how many seconds a transaction that begins now may take; None: no limit."""


def unlimited() -> float | None:
    """Limit nothing."""
    return None


def limited(engine: Engine, limit: TimeLimit) -> Engine:
    """Return a copy of an engine, with the same pool, whose transactions are limited: one round trip for each.

    A copy, because the host's other connections must not call our event listener.
    """
    copy = engine.execution_options()

    def begun(connection: Connection) -> None:
        seconds = limit()
        if seconds is not None:
            with bookkeeping():
                connection.exec_driver_sql(_LIMIT, {"limit": _milliseconds(seconds)})

    event.listen(copy, "begin", begun)
    return copy


def limit_steps(limit: TimeLimit) -> list[Step]:
    """Return what limits the transaction in which it is run; nothing if it is not limited."""
    seconds = limit()
    return [] if seconds is None else [_LIMIT_STATEMENT.with_values(limit=_milliseconds(seconds))]


def _milliseconds(seconds: float) -> str:
    return f"{min(max(round(seconds * 1000), 1), _MOST)}ms"


LIMITS = ["transaction_timeout", "idle_in_transaction_session_timeout", "statement_timeout"]
"""What ends a transaction that its client has left alone: since PostgreSQL 17 whatever it is doing; before that, if it
waits for its client for as long, or is in a statement that takes as long."""

_MOST = 2**31 - 1

_LIMIT = f"""
SELECT set_config(setting, %(limit)s::text, true)
FROM unnest(ARRAY['{"', '".join(LIMITS)}']) AS setting
WHERE current_setting(setting, true)::interval = interval '0'
   OR current_setting(setting, true)::interval > (%(limit)s::text)::interval"""  # noqa: S608 - names of ours
"""A setting that the host has made stricter stays, and one that this server does not know is null, so it is left
alone."""

_LIMIT_STATEMENT = Statement.of(_LIMIT)
