"""Limit transactions: how long a suspended worker, or one that ends without closing its connection, keeps its locks.

A process that is stopped (SIGSTOP, a frozen sandbox of Lambda, a suspended machine) leaves its connection open, and the
server waits for it. Its transaction keeps its locks, first of all those on the inbox's rows, which block every
redelivery::

    worker        BEGIN ── record m1 ── handler … stopped
    Postgres      ├──────── m1 is locked ────────────────────────────────────── until TCP notices, hours later
    redelivery                                          record m1: in flight … in flight … the queue's dead letters

So each transaction tells the server how long it may take, and the server ends it if it is still open then.
"""

from collections.abc import Callable

from sqlalchemy import Connection, Engine, event

from txbox.postgres.round_trip import Statement, Step
from txbox_workers.processing.outage_errors import bookkeeping

TimeLimit = Callable[[], float | None]
"""Says how many seconds a transaction that begins now may take; None means no limit."""


def unlimited() -> float | None:
    """Return None: no limit."""
    return None


def limited(engine: Engine, limit: TimeLimit) -> Engine:
    """Return a copy of an engine, with the same pool, whose transactions are limited. Each costs one more round trip.

    It is a copy because the host's other connections must not call our event listener.
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
    """Return the step that limits the transaction in which it runs; nothing if there is no limit."""
    seconds = limit()
    return [] if seconds is None else [_LIMIT_STATEMENT.with_values(limit=_milliseconds(seconds))]


def _milliseconds(seconds: float) -> str:
    return f"{min(max(round(seconds * 1000), 1), _MOST)}ms"


LIMITS = ["transaction_timeout", "idle_in_transaction_session_timeout", "statement_timeout"]
"""The settings that end a transaction that its client has abandoned. Since PostgreSQL 17, they end it whatever it is
doing; before that, only if it waits for its client that long or is in a statement that takes that long."""

_MOST = 2**31 - 1

_LIMIT = f"""
SELECT set_config(setting, %(limit)s::text, true)
FROM unnest(ARRAY['{"', '".join(LIMITS)}']) AS setting
WHERE current_setting(setting, true)::interval = interval '0'
   OR current_setting(setting, true)::interval > (%(limit)s::text)::interval"""  # noqa: S608 - names of ours
"""A stricter setting of the host stays. A setting that this server does not know is null, and so is left alone."""

_LIMIT_STATEMENT = Statement.of(_LIMIT)
