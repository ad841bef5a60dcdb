"""The poller: one thread that looks for messages to send, often while messages come and seldom while none do.

A poll finds what has become visible since the last one. The poller reads the whole outbox every 30 seconds or less
often, and after anything that may have undone what it found before. A NOTIFY (``txbox.outbox.notifier``) wakes it when
it is idle.
"""

import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine

from txbox.errors import TxboxError
from txbox.instrumentation import DatabaseLost, DatabaseRestored, Event
from txbox.outbox.lanes import RELAYED_LANES
from txbox.outbox.notifier import CHANNEL
from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox.postgres.driver_cursor import run
from txbox.postgres.drivers.greenlets import wait_for
from txbox.postgres.drivers.own_adapters import own_cursors
from txbox.postgres.server import SERVER
from txbox.postgres.transactions import driver_cursor, end_session, short_transaction, unless_locked
from txbox.relay.reporter import RelayReporter
from txbox.relay.scheduler import OUTAGE_BACKOFF, Scheduler
from txbox.relay.sender import RelayStatements

AWAKE_SECONDS = 1.0
"""How long an idle relay keeps polling often after the last message or notification."""

POLL_SECONDS = 0.003
"""Seconds between polls while messages come."""

NEXT_SECONDS = 0.01
"""How long another message is expected soon after a poll has found a single one. If it has found several, they come so
often that sending many together costs less."""

NEXT_POLL_SECONDS = 0.0003
"""Seconds between polls meanwhile, as most of what such a message waits for is a poll. That is about twenty polls."""

SENDING_SECONDS = 0.001
"""How long a message that was found is about to be sent. A poll would delay its sender, which shares our processor."""

OTHERS_SECONDS = 0.02
"""Least time between the poller's other duties: right after a poll they would delay the sender of what it found."""

IDLE_SECONDS = 0.9
"""Seconds between polls while none come; a notification ends the wait."""

MAX_FRESH = 10_000
"""Messages that one poll takes one by one. A larger burst is read lane by lane."""

DUE_SECONDS = 0.1
"""Least time between searches for messages that wait for a time."""

EVERYTHING_SECONDS = 30.0
"""Least time between reads of the whole outbox, which find what no other poll does: rows restored by hand."""

EVERYTHING_SHARE = 0.02
"""The largest share of its time that a relay spends on these reads."""

PAUSE_SECONDS = 2.0
"""Seconds between checks for paused destinations."""

REPAIR_SECONDS = 600.0
"""Seconds between searches for keys that wait for a message that no longer exists."""

STOP_CHECK_SECONDS = 0.1
"""How long a listener may take to notice a stop."""


class OutboxPoller:
    """Adds what it finds to the scheduler, and calls the relay's reporter."""

    def __init__(
        self,
        engine: Engine,
        statements: RelayStatements,
        scheduler: Scheduler,
        reporter: RelayReporter,
        *,
        listen: bool,
        stopping: threading.Event,
        counts: Callable[[], tuple[int, int]],
        on_poll: Callable[[], None],
        on_pauses: Callable[[Mapping[str, "PausedDestination"]], None],
        emit: Callable[[Event], None],
    ) -> None:
        """Store the collaborators; ``stopping`` ends ``run``.

        ``listen``: a notification ends an idle wait. ``counts`` returns how many messages were sent and how many
        refusals there were. ``on_poll`` is called after polls, but not after all of them. ``on_pauses`` gets the paused
        destinations by name, before the first search and then every ``PAUSE_SECONDS``. ``emit`` gets outages of the
        database as events.
        """
        self._engine = engine
        self._statements = statements
        self._outbox = statements.name_of("outbox_message")
        self._scheduler = scheduler
        self._reporter = reporter
        self._listen = listen
        self._stopping = stopping
        self._counts = counts
        self._on_poll = on_poll
        self._on_pauses = on_pauses
        self._emit = emit
        self._awake_until = self._single_at = self._drain_at = self._pauses_at = self._others_at = -math.inf

    def run(self) -> None:
        """Poll until ``stopping`` is set, whatever happens to the database meanwhile."""
        failures = 0
        while not self._stopping.is_set():
            try:
                with (
                    self._engine.connect() as connection,
                    own_cursors(connection),
                    Listener(self._engine, self._statements, wanted=self._listen) as listener,
                ):
                    try:
                        finder = MessageFinder(connection, self._statements)
                        while not self._stopping.is_set():
                            self._read_pauses(connection)
                            self._poll(finder)
                            if failures or time.monotonic() >= self._others_at:
                                self._on_poll()
                                self._reporter.work(connection, *self._counts())
                                self._others_at = time.monotonic() + OTHERS_SECONDS
                            if failures:
                                failures = 0
                                self._emit(DatabaseRestored(RELAY_SUBSCRIBER, self._outbox))
                            self._pause(finder, listener)
                    except BaseException:
                        connection.invalidate()  # the error may come from this connection's state; the next one is new
                        raise
            except BaseException as error:  # noqa: BLE001 - whatever it is, a relay that stops polling stops sending
                self._scheduler.forget()
                failures += 1
                pause = OUTAGE_BACKOFF.seconds(failures)
                self._emit(DatabaseLost(RELAY_SUBSCRIBER, self._outbox, error, pause))
                self._stopping.wait(pause)
        try:
            with short_transaction(self._engine) as connection:
                connection.exec_driver_sql(SERVER.bound_wait, {"lock_timeout": "1s"})
                self._reporter.end(connection, *self._counts())
        except Exception as error:  # noqa: BLE001 - only the status page reads this row
            _log.debug("the row of this relay in outbox_relay could not be deleted: %s", error)

    def _read_pauses(self, connection: Connection) -> None:
        if (now := time.monotonic()) < self._pauses_at:
            return
        rows = unless_locked(
            connection,
            "to ask which destinations are paused",
            lambda: connection.exec_driver_sql(self._statements.paused_destinations).all(),
        )
        if rows is not None:
            self._on_pauses({name: PausedDestination(paused_by, note) for name, paused_by, note in rows})
        elif math.isinf(self._pauses_at):  # nothing is known yet, and what is paused must not be sent
            raise TxboxError(
                "another session has locked the table of what is paused, so nothing is sent before it ends"
            )
        self._pauses_at = now + PAUSE_SECONDS

    def _poll(self, finder: "MessageFinder") -> None:
        now, generation = time.monotonic(), self._scheduler.generation
        found = finder.find(everything=self._scheduler.needs_everything)
        # A held key comes due again and again while its destination is unreachable: no reason to poll often.
        if found.fresh or found.woken:
            self._awake_until = now + AWAKE_SECONDS
            self._single_at = now if found.messages == 1 else -math.inf
        if found or found.everything:
            self._scheduler.add(
                found.fresh, found.due, server=found.server, everything=found.everything, generation=generation
            )

    def _pause(self, finder: "MessageFinder", listener: "Listener") -> None:
        now = time.monotonic()
        if now < self._awake_until:
            if now < self._single_at + NEXT_SECONDS:
                self._stopping.wait(max(self._single_at + SENDING_SECONDS - now, NEXT_POLL_SECONDS))
            else:
                self._stopping.wait(POLL_SECONDS)
            if now >= self._drain_at:
                listener.drain()
                self._drain_at = now + AWAKE_SECONDS
        elif listener.wait(min(IDLE_SECONDS, max(finder.due_in_seconds, POLL_SECONDS)), self._stopping):
            self._awake_until = time.monotonic() + AWAKE_SECONDS


class PausedDestination(NamedTuple):
    paused_by: str
    note: str | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which transactions had ended at one moment, by pg_current_snapshot().

    https://www.postgresql.org/docs/current/functions-info.html#FUNCTIONS-INFO-SNAPSHOT
    """

    xmax: int  # transactions from this number on had not begun
    in_progress: tuple[int, ...]  # transactions below ``xmax`` that had not ended

    @classmethod
    def parse(cls, text: str) -> "Snapshot":
        """Parse ``xmin:xmax:first,second,…``."""
        _, xmax, in_progress = text.split(":")
        return cls(int(xmax), tuple(int(number) for number in in_progress.split(",") if number))


@dataclass(frozen=True, slots=True)
class PollResult:
    server: str = ""  # which run of which server answered; another one may have lost what was found before
    # The whole outbox was read, because it was asked for or another server run answered before: discard what was
    # found before.
    everything: bool = False
    # Lanes with new messages, and the first position of those in each.
    fresh: dict[int, int] = field(default_factory=dict)
    messages: int = 0  # how many new ones those are; 0: unknown
    due: frozenset[int] = frozenset()  # lanes with held keys that are due
    woken: bool = False  # messages that waited for a time now stand behind the others; the next poll finds them

    def __bool__(self) -> bool:
        return bool(self.fresh or self.due or self.woken)


class MessageFinder:
    """Finds what is new each time, and everything the first time."""

    def __init__(self, connection: Connection, statements: RelayStatements, *, lanes: range = RELAYED_LANES) -> None:
        """Take a connection for this finder alone: results from another connection may be another server's.

        It finds what is in ``lanes``.
        """
        # One round trip per poll. At a higher isolation level, a poll would be a transaction that others conflict with.
        connection.execution_options(isolation_level="AUTOCOMMIT")
        default = connection.exec_driver_sql(statements.default_isolation).scalar_one()
        if default != "read committed":
            connection.commit()
            connection.execution_options(isolation_level="READ COMMITTED")
        self._connection = connection
        self._statements = statements
        self._lanes = {"low": lanes[0], "high": lanes[-1]}
        self._last: Snapshot | None = None
        self._server: str | None = None
        self._due_at = math.inf
        self._everything_at = self._find_due_at = self._repair_at = -math.inf
        self._find_new, self._bursts = statements.find_new, 0

    @property
    def due_in_seconds(self) -> float:
        """Seconds until the next message that waits for a time is due, as far as known; infinity if none waits."""
        return self._due_at - time.monotonic()

    def find(self, *, everything: bool = False) -> PollResult:
        """Return what is new, or everything as if for the first time. Raise any error of the driver."""
        now = time.monotonic()
        also_due = now >= min(self._find_due_at, self._due_at)
        with driver_cursor(self._connection) as cursor:
            answer = self._find(cursor, now, also_due=also_due, everything=everything)
            if answer[1] != self._server:
                if not everything and self._last is not None:
                    answer = self._find(cursor, now, also_due=also_due, everything=True)
                everything = True
            seen, server, lanes, positions, due_in, held_due, *count = answer
            snapshot = Snapshot.parse(seen)
            # Behind a pooler, another server may answer from one moment to the next. Its numbers cannot be
            # compared with the earlier ones.
            if self._last is not None and snapshot.xmax < self._last.xmax:
                self._everything_at = -math.inf
            woken = False
            if also_due:
                self._find_due_at = now + DUE_SECONDS
                self._due_at = math.inf if due_in is None else now + due_in
                if self._due_at <= now:
                    cursor.execute(self._statements.wake_due, {"limit": MAX_FRESH})
                    woken = cursor.rowcount > 0
            if now >= self._repair_at:
                self._repair_at = now + REPAIR_SECONDS
                cursor.execute(self._statements.repair_held_keys, {})
            self._commit()
        self._last, self._server = snapshot, server
        fresh = dict(zip(lanes or (), positions or (), strict=True))
        return PollResult(server, everything, fresh, count[0] if count else 0, frozenset(held_due), woken)

    def _find(self, cursor: Any, now: float, *, also_due: bool, everything: bool) -> tuple[Any, ...]:
        sql, last = self._statements, self._last
        if everything or last is None or now >= self._everything_at:
            cursor.execute(sql.find_all, {"also_due": also_due, **self._lanes})
            whole = tuple(cursor.fetchone())
            took = time.monotonic() - now
            self._everything_at = now + max(EVERYTHING_SECONDS, took / EVERYTHING_SHARE)
            return whole
        parameters = {"xmax": last.xmax, "in_progress": list(last.in_progress), "also_due": also_due}
        parameters |= self._lanes
        cursor.execute(self._find_new, {**parameters, "limit": MAX_FRESH})
        answer = cursor.fetchone()
        if answer[-1] >= MAX_FRESH:
            # A plan that was made while the table was small would scan all of it now: make another.
            self._bursts += 1
            self._find_new = f"{sql.find_new}\n-- burst {self._bursts}"
            # Some were not seen, perhaps the first ones of a key, so what was seen cannot be used.
            self._commit()
            cursor.execute("BEGIN")
            cursor.execute(sql.set_plan)
            cursor.execute(sql.find_burst, parameters)
            answer = cursor.fetchone()
            cursor.execute("COMMIT")
        return tuple(answer)

    def _commit(self) -> None:
        # SQLAlchemy does not end a transaction that it has not seen begin.
        self._connection.connection.commit()


class Listener:
    """A separate connection that listens for notifications while entered, or only waits if it cannot listen."""

    def __init__(self, engine: Engine, statements: RelayStatements, *, wanted: bool) -> None:
        """Prepare. Entering connects, unless not ``wanted``; then it only waits."""
        self._engine = engine
        self._statements = statements
        self._wanted = wanted
        self._driver: Any = None
        self._connection: Connection | None = None

    def __enter__(self) -> "Listener":
        if not self._wanted or self._engine.dialect.driver != "psycopg":
            return self
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            driver = connection.connection.driver_connection
            assert driver is not None  # noqa: S101 - for the type checker
            # A pooler in transaction mode answers for many servers; the LISTEN would stay with one of them.
            if run(connection, SERVER.backend_pid).scalar_one() == driver.info.backend_pid:
                connection.exec_driver_sql(self._statements.keep_idle_session)
                connection.exec_driver_sql(f"LISTEN {CHANNEL}")  # a standby refuses it: nothing closes a detached one
                connection.detach()  # a listening connection is of no use to the pool
                self._driver, self._connection = driver, connection
                return self
            _log.info("a pooler is between the relay and the database: the relay polls, and does not listen")
        except BaseException:
            connection.invalidate()
            connection.close()
            raise
        connection.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            end_session(self._connection)
            self._connection = self._driver = None

    def drain(self) -> None:
        """Read the pending notifications: the server keeps them until every session of every database has."""
        if self._driver is not None:
            self._notified(0)

    def wait(self, seconds: float, stopping: threading.Event) -> bool:
        """Wait for a notification or a stop; return whether a notification came."""
        if self._driver is None:
            stopping.wait(seconds)
            return False
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not stopping.is_set():
            if self._notified(min(left, STOP_CHECK_SECONDS), stop_after=1):
                return True
        return False

    def _notified(self, seconds: float, stop_after: int | None = None) -> bool:
        """Read notifications for some time; return whether any came."""
        came = self._driver.notifies(timeout=seconds, stop_after=stop_after)
        if isinstance(came, AsyncIterator):  # of an engine for coroutines, in a greenlet
            return wait_for(_any(came))
        return bool(list(came))


async def _any(came: AsyncIterator[object]) -> bool:
    return bool([one async for one in came])


_log = logging.getLogger("txbox.relay")
