"""Who still uses a connection after the work it was given to is over: a thread or a task that outlives that work.

``asyncio`` can stop waiting for a thread, but cannot stop the thread. So a handler may be inside a statement when its
request is cancelled, and a coroutine may shield a task of its own. Closing its connection then would free memory that
libpq still uses, and a socket whose number the next connection gets. Returning it to its pool would mix the work of two
requests. Such a connection is abandoned::

    the request  session ── cancelled ── end: a statement is under way ── abandon: forget it, cancel, shut its socket
    its thread       └─ statement ──────────────────────────────────────────────── OperationalError ── the last use

A statement that comes after the end is refused before it reaches the driver.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any
from weakref import WeakSet

import psycopg
from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.exc import ResourceClosedError

CANCEL_SECONDS = 2.0
"""How long the server may take to cancel a statement before we shut the connection's socket."""


class ConnectionUsers:
    """Tracks who uses the connections of one piece of work: a request, or a message. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: set[Any] = set()  # cursors, and connections
        self._streams: set[Any] = set()  # cursors that fetch rows from the server only when asked for
        self._rolled_back: set[Connection] = set()
        self._ended_by: object = None

    def attach(self, connection: Connection) -> None:
        """Note what a connection is used for from now on; ``watch`` must have been given its engine."""
        vars(connection)[_USERS] = self  # five times as fast as ``execution_options``, which tells the dialect

    def detach(self, connection: Connection) -> None:
        """Let anyone use an open connection, even after the end: its owner goes on with it."""
        vars(connection).pop(_USERS, None)

    def end(self) -> bool:
        """Refuse all later use, except by this thread or task.

        Returns:
            Whether something is under way, so that the connections can only be abandoned.
        """
        with self._lock:
            self._ended_by = _current()
            return bool(self._under_way) or any(map(_rolls, self._rolled_back))

    def have_streams(self) -> bool:
        """Whether a result was not read to its end, and fetches its rows from the server only when asked for them."""
        return any(map(_is_open, self._streams))

    @contextmanager
    def using(self, connection: Connection) -> Iterator[None]:
        """Note that a connection is used without a cursor; raise ``ResourceClosedError`` after the end."""
        self._begin(connection)
        try:
            yield
        finally:
            self._finish(connection)

    def _begin(self, cursor: Any) -> None:
        with self._lock:
            self._refuse_late()
            self._under_way.add(cursor)

    def _finish(self, cursor: Any, *, is_stream: bool = False) -> None:
        with self._lock:
            self._under_way.discard(cursor)
            if is_stream:
                self._streams.add(cursor)

    def _roll_back(self, connection: Connection) -> None:
        with self._lock:
            self._refuse_late()
            if self._ended_by is None:
                self._rolled_back.add(connection)

    def _refuse_late(self) -> None:
        if self._ended_by is not None and self._ended_by != _current():
            raise ResourceClosedError(
                "the request or the message that this session was made for is over, and its transaction with it: wait "
                "for the threads and tasks that you start before you return, also when you are cancelled"
            )


def watch(target: Engine | Connection) -> None:
    """Report to ``ConnectionUsers`` what the connections of an engine, or one connection, are used for."""
    dialect = target.dialect
    if dialect not in _watched:
        _watched.add(dialect)
        event.listen(target.engine, "handle_error", _note_error)
    if event.contains(target, "before_cursor_execute", _note_begin):
        return
    event.listen(target, "before_cursor_execute", _note_begin)
    event.listen(target, "after_cursor_execute", _note_end)
    event.listen(target, "rollback", _note_rollback)


def abandon(connection: Connection) -> None:
    """Give up a connection that somebody may still use, without closing it while they do.

    Its pool forgets it, and what is under way on it fails: we ask the server to cancel it, and shut the socket within
    CANCEL_SECONDS, so that the server rolls back. The memory is freed with the last reference to the connection. What
    asyncpg waits for is not cancelled: the server may finish it.
    """
    if connection.closed or connection.invalidated:
        return
    pooled: Any = connection.connection
    driver = pooled.driver_connection
    record = pooled._connection_record  # noqa: SLF001 - no other way to have a pool forget without closing
    if record is not None:
        record.dbapi_connection = None
    connection.invalidate()
    if not _close_unused(driver):
        _cut_off(driver)
        if hasattr(driver, "pgconn"):  # psycopg's, which warns if it is garbage-collected while it is open
            kind: Any = type(driver)
            driver.__class__ = _abandoned(kind)


def _close_unused(driver: Any) -> bool:
    """Close a connection if nobody waits in it; return whether it is closed, or soon will be."""
    if driver is None or getattr(driver, "closed", False):
        return True
    if (terminate := getattr(driver, "terminate", None)) is not None:
        terminate()  # asyncpg's: a transport of asyncio, whose waiters get an error
        return True
    lock, pgconn = getattr(driver, "lock", None), getattr(driver, "pgconn", None)  # psycopg's; a waiter holds the lock
    if pgconn is None or lock is None:
        return False
    if isinstance(lock, asyncio.Lock):
        if lock.locked():
            return False
        pgconn.finish()
        return True
    if not lock.acquire(blocking=False):
        return False
    try:
        pgconn.finish()
    finally:
        lock.release()
    return True


def _cut_off(driver: Any) -> None:
    """Ask the server to cancel what a connection waits for, then shut its socket, in another thread or task.

    A duplicate shuts the socket, so that its own number stays valid until it is freed.
    """
    with suppress(Exception):  # closed meanwhile; or a driver that reveals no socket, whose statement runs to its end
        number = driver.fileno()
        end = socket.socket(fileno=os.dup(number))
        if driver.fileno() != number:  # closed in between, and the number may belong to another socket
            end.close()
        elif isinstance(driver, psycopg.AsyncConnection):
            task = asyncio.get_running_loop().create_task(_cancel_on_loop(driver, end))
            _cancelling.add(task)
            task.add_done_callback(_cancelling.discard)
        else:
            threading.Thread(target=_cancel, args=(driver, end), name="txbox-abandon", daemon=True).start()


def _cancel(driver: Any, end: socket.socket) -> None:
    try:
        with suppress(Exception):  # the server itself may be gone
            driver.cancel_safe(timeout=CANCEL_SECONDS)
    finally:
        _shut(end)


async def _cancel_on_loop(driver: Any, end: socket.socket) -> None:
    try:
        with suppress(Exception):
            await driver.cancel_safe(timeout=CANCEL_SECONDS)
    finally:
        _shut(end)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@cache
def _abandoned(kind: Any) -> type[Any]:
    def close(self: Any) -> None:
        self.pgconn.finish()

    return type(kind.__name__, (kind,), {"__del__": close, "__module__": kind.__module__})


def _note_begin(connection: Connection, cursor: Any, *_: object) -> None:
    if (users := _users_of(connection)) is not None:
        users._begin(cursor)  # noqa: SLF001


def _note_end(connection: Connection, cursor: Any, _statement: str, _values: object, context: Any, _many: bool) -> None:
    if (users := _users_of(connection)) is not None:
        users._finish(cursor, is_stream=bool(getattr(context, "_is_server_side", False)))  # noqa: SLF001


def _note_error(context: ExceptionContext) -> None:
    connection, execution = context.connection, context.execution_context
    if connection is None or execution is None:
        return
    if (users := _users_of(connection)) is not None:
        users._finish(execution.cursor)  # noqa: SLF001


def _note_rollback(connection: Connection) -> None:
    if connection.closed or connection.invalidated:
        return  # nothing is sent
    if (users := _users_of(connection)) is not None:
        users._roll_back(connection)  # noqa: SLF001


def _users_of(connection: Connection) -> ConnectionUsers | None:
    users: ConnectionUsers | None = vars(connection).get(_USERS)
    return users


def _is_open(cursor: Any) -> bool:
    return not getattr(cursor, "closed", False)


def _rolls(connection: Connection) -> bool:
    """Whether a rollback that began on a connection is still under way."""
    return not connection.closed and connection.in_transaction()


def _current() -> object:
    """Return what distinguishes this thread, or this task, from others."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident(), task


_USERS = "txbox_connection_users"
_watched: "WeakSet[Dialect]" = WeakSet()
_cancelling: set[asyncio.Task[None]] = set()
"""Tasks that ask servers to cancel; the loop itself keeps no reference to them."""
