"""Opens the sessions of chunks. Nothing that the caller's statements leave in one reaches the next chunk."""

from typing import Any

from sqlalchemy import URL, Engine, NullPool, event

from txbox import SqlEffect
from txbox.postgres.engines import open_engine
from txbox.postgres.guards.transaction_guard import guard
from txbox_spark.options import Apply

NEVER = 1 << 30
"""Prepare nothing: psycopg does not always notice that a reset has dropped its statements."""


def open_sessions(url: str | URL, apply: Apply, at_once: int = 1) -> Engine:
    """Return an engine whose every transaction begins in a session without traces of another one; dispose of it.

    A session is reset between two chunks, because a new one costs a chunk some 30 ms of its time: Postgres starts a
    process, checks the password, and reads its catalogs anew for each statement. A callable gets new sessions, because
    it may change the driver's connection, too.

    Args:
        url: the database.
        apply: the effect.
        at_once: how many chunks are merged at once.
    """
    if not isinstance(apply, str | SqlEffect):
        return guard(open_engine(url, poolclass=NullPool))
    engine = open_engine(url, pool_size=at_once, pool_reset_on_return=None)
    event.listen(engine, "connect", _prepare_nothing)
    event.listen(engine, "reset", _reset)
    return guard(engine)


def _prepare_nothing(connection: Any, _: Any) -> None:
    if connection.prepare_threshold is not None:
        connection.prepare_threshold = NEVER


def _reset(connection: Any, record: Any, state: Any) -> None:
    """Undo whatever SQL can leave in a session."""
    # Behind a pooler, which was noticed or which the URL tells of, others use the session, too, and may have prepared
    # statements in it.
    if state.terminate_only or connection.prepare_threshold is None:
        record.invalidate()
        return
    connection.rollback()
    connection.autocommit = True
    connection.execute("DISCARD ALL")
    connection.autocommit = False
