"""The watchdog: a wait for the database's answer ends within a stated time.

The kernel notices a peer that is gone (see ``engines.KEEPALIVES``), but not a proxy that acknowledges packets and
forwards nothing, nor a frozen server. So one thread of the process watches the waits of psycopg's connections. A long
wait may be a long statement, so a second connection to the same server asks::

    wait ── watchdog seconds ── ask the server what the session does ──┬── it works: wait on
                                                                      ├── it does not: shut the socket
                                                                      └── no answer in time: shut the socket

A pooler that accepts the second connection may have no server free, neither for the question nor for the wait. Then
there is no answer, and the wait goes on for UNKNOWN_SECONDS. Work that has less time, such as a running lease, uses
``bounded``.

When the socket is shut, the waiting thread gets ``psycopg.OperationalError``, as for every lost connection.
"""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from math import inf
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from txbox.postgres.server import SERVER
from txbox.text import log_failure

WATCHDOG_SECONDS = 20.0
"""How long an answer may take before we ask the server whether it works on it."""

ANSWER_SECONDS = 10.0
"""How long that question may take."""

UNKNOWN_SECONDS = 600.0
"""How long a wait goes on if the server can be reached but gives no answer: behind a pooler, or if it refuses."""

SHORTEST_SECONDS = 0.5
"""We ask about no wait earlier than this: more connections do not help a slow server."""

TICK_SECONDS = 0.25


def watch(driver: Any, seconds: float = WATCHDOG_SECONDS) -> None:
    """Watch every wait of a connection from now on.

    ``seconds`` is how long an answer may take before we ask the server; 0: do not watch.
    """
    if seconds > 0 and _SECONDS not in driver.__dict__:
        kind: Any = type(driver)
        driver.__class__ = _watched(kind)
        driver.__dict__[_SECONDS] = seconds


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Ask the server earlier about waits in this block, on watched connections.

    We ask after so many seconds, and the question may take as long: at least SHORTEST_SECONDS, and never longer than
    outside the block.
    """
    before = _bound.set(max(seconds, SHORTEST_SECONDS))
    try:
        yield
    finally:
        _bound.reset(before)


def bound() -> float:
    """Return the seconds of the innermost ``bounded`` block of this thread; ``math.inf`` outside of any."""
    return _bound.get()


def note_pooler(driver: Any, server: int) -> None:
    """Note that a pooler answers on a connection, and which server process it uses in this transaction."""
    in_transaction = driver.pgconn.transaction_status != TransactionStatus.IDLE
    driver.__dict__.update({_POOLED: True, _SERVER: server if in_transaction else None})


@cache
def _watched(kind: Any) -> type[Any]:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        current = _Wait(self)
        _watchdog.begin(current)
        try:
            return kind.wait(self, *args, **kwargs)
        except psycopg.Error as error:
            if current.error is not None:
                raise psycopg.OperationalError(current.error) from error
            raise
        finally:
            _end_wait(current)

    async def wait_on_loop(self: Any, generator: Any, *args: Any, **kwargs: Any) -> Any:
        current = _Wait(self)
        _watchdog.begin(current)
        try:
            self.pgconn.socket  # noqa: B018 - raises if the connection is closed, before anything is sent
            begun = _BegunGenerator(generator)
            if begun.ended is not None and self.pgconn.transaction_status == TransactionStatus.IDLE:
                return begun.ended.value  # psycopg would let the loop run now and then; see _BegunGenerator
            return await kind.wait(self, begun, *args, **kwargs)
        except psycopg.Error as error:
            if current.error is not None:
                raise psycopg.OperationalError(current.error) from error
            raise
        finally:
            _end_wait(current)

    def commit(self: Any) -> None:
        if not _is_idle(self):  # a wait for nothing takes as long as any other
            kind.commit(self)

    def rollback(self: Any) -> None:
        if not _is_idle(self):
            kind.rollback(self)

    changed: dict[str, Any] = {"wait": wait, "commit": commit, "rollback": rollback}
    if issubclass(kind, psycopg.AsyncConnection):
        changed = {"wait": wait_on_loop}
    return type(kind.__name__, (kind,), {**changed, "__module__": kind.__module__})


class _BegunGenerator:
    """A generator of psycopg's whose first step is done, which is all that many have: a rollback of nothing, a setting.

    After those, psycopg lets the event loop run if it had no turn for five milliseconds. A cancellation that came
    meanwhile, outside a transaction, would hit SQLAlchemy while it takes the connection back into the pool, where its
    place would be lost for good.
    """

    __slots__ = ("_first", "_generator", "ended", "send")

    def __init__(self, generator: Any) -> None:
        self._first: Any = None
        self.ended: StopIteration | None = None
        try:
            self._first = next(generator)
        except StopIteration as ended:
            self.ended = ended
        self._generator, self.send = generator, generator.send

    def __next__(self) -> Any:
        if self.ended is not None:
            raise self.ended
        first, self._first = self._first, None
        return next(self._generator) if first is None else first


def _is_idle(driver: Any) -> bool:
    """Whether psycopg would find nothing to commit, to roll back, or to refuse."""
    return (
        driver.pgconn.transaction_status == TransactionStatus.IDLE
        and not driver._num_transactions  # noqa: SLF001 - as psycopg itself decides
        and not driver._tpc  # noqa: SLF001
        and driver._pipeline is None  # noqa: SLF001
    )


def _end_wait(current: "_Wait") -> None:
    driver = current.driver
    _watchdog.end(current)
    if _POOLED in driver.__dict__ and driver.pgconn.transaction_status == TransactionStatus.IDLE:
        driver.__dict__[_SERVER] = None


class _Wait:
    """One wait; each statement makes one, so it only notes what cannot be found out later."""

    __slots__ = ("_limit", "asked", "began", "driver", "error", "since", "suspected")

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self._limit = _bound.get()
        self.began = self.since = time.monotonic()
        # We do not ask about the question itself.
        self.suspected = _ASKS in driver.__dict__
        self.asked: float | None = self.since if self.suspected else None
        self.error: str | None = None

    @property
    def seconds(self) -> float:
        return min(float(self.driver.__dict__.get(_SECONDS, ANSWER_SECONDS)), self._limit)

    @property
    def answer_seconds(self) -> float:
        return min(ANSWER_SECONDS, self._limit)

    @property
    def is_bounded(self) -> bool:
        return self._limit < inf

    @property
    def pooled(self) -> bool:
        return _POOLED in self.driver.__dict__

    def unknown_seconds(self, *, pooler_answered: bool) -> float:
        """Return how long to wait without an answer from the server; a bounded wait may be retried.

        ``pooler_answered``: a pooler had a server free for the question, so the wait is not for a free server.
        """
        if pooler_answered and self.is_bounded:
            return self.seconds + self.answer_seconds
        return max(UNKNOWN_SECONDS, self.seconds)

    @property
    def server(self) -> int | None:
        """The process id of the server that should answer; None: only a pooler knows it, or the wait is over."""
        if self.pooled:
            server: int | None = self.driver.__dict__.get(_SERVER)
            return server
        with suppress(psycopg.Error):  # closed since
            return int(self.driver.pgconn.backend_pid)
        return None


class _Watchdog:
    """Keeps the waits of this process, and checks them from a thread.

    Every statement of every connection begins and ends a wait, so both work without a lock: adding to a set and
    removing from it are atomic. Only a wait that we asked the server about may be cut, and its end waits for the cut::

        watchdog thread   suspected ── ask the server ── lock: still among the waits? shut its socket
        waiting thread    remove it from the waits ── suspected? lock and unlock ── use the connection, or close it
    """

    def __init__(self) -> None:
        self._cutting = threading.Lock()
        self._starting = threading.Lock()
        self._waits: set[_Wait] = set()
        self._has_waits = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, wait: _Wait) -> None:
        self._waits.add(wait)
        if not self._has_waits.is_set():
            self._start()
            self._has_waits.set()

    def end(self, wait: _Wait) -> None:
        self._waits.discard(wait)
        if wait.suspected:
            with self._cutting:
                pass

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="txbox-watchdog", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            self._has_waits.clear()
            if not self._waits:  # a wait that begins after this check sets it again
                self._has_waits.wait()
            time.sleep(TICK_SECONDS)
            try:
                self._check()
            except BaseException:  # noqa: BLE001 - this thread has to go on
                log_failure("the waits for the database could not be checked")

    def _check(self) -> None:
        now = time.monotonic()
        began = self._waits.copy()  # atomic, while other threads add and remove waits
        waits = [wait for wait in began if now - wait.since >= wait.seconds or wait.asked is not None]
        due: dict[tuple[Any, ...], list[_Wait]] = {}
        for wait in waits:
            if wait.driver.pgconn.transaction_status != TransactionStatus.ACTIVE:
                continue  # it waits for a notification, or is over
            if wait.asked is None:
                with suppress(psycopg.Error):  # over and closed since
                    server = tuple(_beside(wait.driver).items())
                    wait.suspected = True
                    wait.asked = now
                    due.setdefault((server, wait.answer_seconds), []).append(wait)
            elif now - wait.asked > wait.answer_seconds:
                self._cut(wait, "and a new connection to it had no answer either")
        for (server, _), together in due.items():
            ask = threading.Thread(
                target=self._ask, args=(dict(server), together), name="txbox-watchdog-ask", daemon=True
            )
            ask.start()

    def _ask(self, server: dict[str, Any], waits: list[_Wait]) -> None:
        """Ask the server of these waits what their sessions do; let them wait on, or shut their sockets.

        A wait may end meanwhile and its connection be closed; that does not affect the others.
        """
        at_work: set[int] | None = None
        answered = False
        try:
            with bounded(waits[0].answer_seconds), _connection(server) as asking:
                for wait in waits:
                    # The pooler answers, but may have no server free; a bounded wait does not wait for one.
                    if wait.pooled and wait.answer_seconds == ANSWER_SECONDS:
                        wait.asked = inf
                servers = [wait.server for wait in waits if wait.server is not None]
                asked = {"pids": servers, "seconds": min(wait.seconds for wait in waits) / 4}
                at_work = {row[0] for row in asking.execute(SERVER.sessions_at_work, asked).fetchall()}
                answered = True
        except Exception as error:  # noqa: BLE001 - a driver or a network may raise anything
            answered = answered or getattr(error, "sqlstate", None) is not None  # the server refuses, so it is there
        now = time.monotonic()
        for wait in waits:
            if not answered and wait.asked != inf:
                continue  # until its answer_seconds are over
            answer = at_work is not None and wait.server is not None
            if answer and wait.server not in (at_work or ()):
                self._cut(wait, "and reports that it is not at work for this session")
            elif not answer and now - wait.began > wait.unknown_seconds(
                pooler_answered=wait.pooled and at_work is not None
            ):
                self._cut(wait, "and does not report whether it is at work for this session")
            else:
                wait.since, wait.asked = now, None

    def _cut(self, wait: _Wait, why: str) -> None:
        seconds = time.monotonic() - wait.began
        with self._cutting:  # so that the connection is not closed meanwhile, and its socket number reused
            if wait not in self._waits:
                return
            if _has_come(wait):  # nobody has read the answer yet, because its thread or the event loop is busy
                wait.since, wait.asked = time.monotonic(), None
                return
            wait.error = (
                f"the database has not answered for {seconds:.0f} s, {why}; what was asked may have been done, or not"
            )
            with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(wait.driver.pgconn.socket)) as end:
                end.shutdown(socket.SHUT_RDWR)
        _log.warning("a connection is closed: %s", wait.error)


def _has_come(wait: _Wait) -> bool:
    """Whether unread data from the server has arrived."""
    try:
        readable, _, _ = select.select([wait.driver.pgconn.socket], [], [], 0)
    except (OSError, ValueError, psycopg.Error):  # closed meanwhile; or a number that select does not accept
        return False
    return bool(readable)


def _beside(driver: Any) -> dict[str, Any]:
    """Return the parameters for a new connection to the same server."""
    info = driver.info
    parameters: dict[str, Any] = info.get_parameters()
    for name in ("service", "hostaddr"):
        parameters.pop(name, None)
    parameters |= {"host": info.host, "port": info.port}
    if info.hostaddr and not info.host.startswith("/"):
        parameters["hostaddr"] = info.hostaddr
    if info.password:
        parameters["password"] = info.password
    return parameters


def _connection(parameters: dict[str, Any]) -> Any:
    """Connect to ask a server, and wait for each answer for at most ``bound()`` seconds."""
    parameters = parameters | {"connect_timeout": str(max(round(bound() / 2), 1))}
    asking = _watched(psycopg.Connection).connect(**parameters, autocommit=True, prepare_threshold=None)
    asking.__dict__.update({_SECONDS: ANSWER_SECONDS, _ASKS: True})
    return asking


def _start_after_fork() -> None:
    global _watchdog
    _watchdog = _Watchdog()


_bound: ContextVar[float] = ContextVar("txbox_watchdog_bound", default=inf)
_SECONDS = "txbox_watchdog_seconds"
_POOLED = "txbox_pooled"
_SERVER = "txbox_server"
_ASKS = "txbox_asks"

_log = logging.getLogger("txbox.postgres")
_watchdog = _Watchdog()
os.register_at_fork(after_in_child=_start_after_fork)
