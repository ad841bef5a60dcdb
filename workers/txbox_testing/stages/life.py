"""A life: one run of a worker or a relay, from its start to its end or its death, and the places that it passes.

A death is simulated, because the handlers and what they append to are in the process that runs the tests: a gate holds
the thread for good, no lease is renewed any more, the broker hears nothing, and Postgres ends every session of the
database, as it does when the sockets of a killed process close. Between the places nothing is under way, so Postgres
has then what it would have after SIGKILL; and none of the ``except`` and ``finally`` blocks of a handler has run.
"""

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from sqlalchemy import Connection, Engine, Pool, event

from txbox import LedgerError
from txbox.leases import Acquisition, Lease, LeaseState, Ledger
from txbox.leases.handlers import is_coroutine_function

STATEMENT_CHARACTERS = 60


class Killed(BaseException):
    """Ends the code of a handler that was held as killed, once its trial is over."""


class Gate:
    """Holds the first thread that comes to a place for the n-th time.

    Args:
        place: its name; see ``txbox_testing.faults.PLACES``.
        passes: 1 holds the first one that comes there, 2 the second.
    """

    def __init__(self, place: str, passes: int = 1) -> None:
        self.place = place
        self.passes = passes
        self.reached = threading.Event()
        self._released = threading.Event()
        self._kills = False

    def hold(self) -> None:
        """Wait until it is released; raises ``Killed`` if this thread is not to go on."""
        self.reached.set()
        self._released.wait()
        if self._kills:
            raise Killed

    @property
    def holds(self) -> bool:
        """Whether a thread is held here."""
        return self.reached.is_set() and not self._released.is_set()

    def release(self, *, kill: bool = False) -> None:
        """Let the thread go on, or end its handler; a second call changes nothing."""
        if not self._released.is_set():
            self._kills = kill
            self._released.set()


class Life:
    """What is known of one run of a worker, and what is to befall it.

    Attributes:
        dead: killed: whatever it still does has no effect.
        over: what is dead may end its threads.
        stopped: as by SIGSTOP: its leases are not renewed.
        places: what it has passed, in this order, each with how often before.
        engines: with which its handler has run statements.
        statements: the text of the statements of its handler, by the number that ``crash_at`` counts.
    """

    def __init__(self, *gates: Gate) -> None:
        self.gates = gates
        self.dead = False
        self.over = threading.Event()
        self.stopped = False
        self.places: list[tuple[str, int]] = []
        self.engines: set[Engine] = set()
        self.statements: list[str] = []
        self._passed: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def held(self) -> bool:
        """Whether a gate holds it, as a process that is stopped, or dead: it takes nothing."""
        return any(gate.holds for gate in self.gates)

    def reach(self, place: str) -> None:
        """Pass a place, or be held there; raises ``Killed`` if it is dead, and its test is over."""
        if self.dead:
            self.over.wait()
            raise Killed
        with self._lock:
            self._passed[place] += 1
            number = self._passed[place]
            self.places.append((place, number))
        for gate in self.gates:
            if (gate.place, gate.passes) == (place, number):
                gate.hold()

    def watch(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return the handler, with the places around it, and those at its statements."""
        if is_coroutine_function(handler):

            @functools.wraps(handler)
            async def watched_coroutine(*arguments: Any, **named: Any) -> Any:
                self.reach("begun")
                with self._in_handler():
                    result = await handler(*arguments, **named)
                self.reach("handled")
                return result

            return watched_coroutine

        @functools.wraps(handler)
        def watched(*arguments: Any, **named: Any) -> Any:
            self.reach("begun")
            with self._in_handler():
                result = handler(*arguments, **named)
            self.reach("handled")
            return result

        return watched

    @contextlib.contextmanager
    def _in_handler(self) -> Iterator[None]:
        token = _in_hand.set(self)
        try:
            yield
        finally:
            _in_hand.reset(token)

    def ran(self, connection: Connection, statement: str) -> None:
        """Pass the place after a statement of the handler."""
        self.engines.add(connection.engine)
        self.statements.append(" ".join(statement.split())[:STATEMENT_CHARACTERS])
        self.reach("statement")


_in_hand: ContextVar[Life | None] = ContextVar("txbox_testing_life", default=None)
"""Whose handler runs here."""


@contextlib.contextmanager
def statements_watched() -> Iterator[None]:
    """While entered: every statement of a watched handler, with any engine of SQLAlchemy, is a place.

    So is every connection that it gives back to its pool, as it may have committed on it.
    """

    def ran(connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if (life := _in_hand.get()) is not None:
            life.ran(connection, statement)

    def given_back(connection: Any, *_: Any) -> None:
        if (life := _in_hand.get()) is not None:
            try:
                life.reach("closed")
            except Killed:
                connection.close()  # it does not get to its pool any more, which would close it
                raise

    event.listen(Engine, "after_cursor_execute", ran)
    event.listen(Pool, "checkin", given_back)
    try:
        yield
    finally:
        event.remove(Engine, "after_cursor_execute", ran)
        event.remove(Pool, "checkin", given_back)


class WatchedLedger:
    """A ledger, with the places of a lease's life; that of a dead worker renews nothing. Implements ``Ledger``."""

    def __init__(self, ledger: Ledger, life: Life) -> None:
        self._ledger = ledger
        self._life = life

    def __getattr__(self, name: str) -> Any:  # what else it has, such as find_expired
        return getattr(self._ledger, name)

    def __repr__(self) -> str:
        return repr(self._ledger)

    def acquire(self, message_id: str, **options: Any) -> Acquisition:
        """Acquire a lease, and pass the place after it."""
        acquisition = self._ledger.acquire(message_id, **options)
        if acquisition.state is LeaseState.ACQUIRED:
            self._life.reach("leased")
        return acquisition

    def renew(self, lease: Lease, **options: Any) -> None:
        """Renew a lease, unless this worker is dead or stopped."""
        if self._life.dead or self._life.stopped:
            raise LedgerError("this worker does not run, as this trial wants it")
        self._ledger.renew(lease, **options)

    def complete(self, lease: Lease, result: bytes | None = None) -> None:
        """Complete a message, and pass the place after it."""
        self._ledger.complete(lease, result)
        self._life.reach("completed")
