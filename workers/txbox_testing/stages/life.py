"""A life: one run of a worker or a relay, from its start to its end or death, with the places that it passes.

A death is simulated, because handlers and what they append to are in the process that runs the tests. A gate holds the
thread for good, leases are no longer renewed, the broker hears nothing, and Postgres ends every session of the
database, as it does when a killed process's sockets close. Nothing happens between two places, so Postgres then holds
what it would hold after SIGKILL; and none of a handler's ``except`` and ``finally`` blocks has run.
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
        passes: 1 holds the first thread that comes there, 2 the second.
    """

    def __init__(self, place: str, passes: int = 1) -> None:
        self.place = place
        self.passes = passes
        self.reached = threading.Event()
        self._released = threading.Event()
        self._kills = False

    def hold(self) -> None:
        """Wait until the gate is released. Raise ``Killed`` if this thread must not continue."""
        self.reached.set()
        self._released.wait()
        if self._kills:
            raise Killed

    @property
    def holds(self) -> bool:
        """Whether a thread is held here."""
        return self.reached.is_set() and not self._released.is_set()

    def release(self, *, kill: bool = False) -> None:
        """Let the thread continue, or end its handler. A second call changes nothing."""
        if not self._released.is_set():
            self._kills = kill
            self._released.set()


class Life:
    """One run of a worker, and what is to happen to it.

    Attributes:
        dead: it is killed: whatever it still does has no effect.
        over: set once the threads of a dead one may end.
        stopped: as by SIGSTOP: its leases are not renewed.
        places: those passed, in this order, each with its number of passes.
        engines: those with which its handler has run statements.
        statements: the text of its handler's statements, by the number that ``crash_at`` counts.
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
        """Whether a gate holds it, as if it were stopped or dead: it receives nothing."""
        return any(gate.holds for gate in self.gates)

    def reach(self, place: str) -> None:
        """Pass a place, or be held there. Raise ``Killed`` if it is dead and its test is over."""
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
        """Return the handler with places before and after it, and at its statements."""
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
"""The life whose handler runs here."""


@contextlib.contextmanager
def statements_watched() -> Iterator[None]:
    """While entered, make a place of every statement that a watched handler runs, with any engine of SQLAlchemy.

    Every connection that the handler returns to its pool is a place, too, as it may have committed on it.
    """

    def ran(connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if (life := _in_hand.get()) is not None:
            life.ran(connection, statement)

    def given_back(connection: Any, *_: Any) -> None:
        if (life := _in_hand.get()) is not None:
            try:
                life.reach("closed")
            except Killed:
                connection.close()  # it no longer gets to its pool, which would close it
                raise

    event.listen(Engine, "after_cursor_execute", ran)
    event.listen(Pool, "checkin", given_back)
    try:
        yield
    finally:
        event.remove(Engine, "after_cursor_execute", ran)
        event.remove(Pool, "checkin", given_back)


class WatchedLedger:
    """A ledger with the places of a lease's life. A dead worker's renews nothing. Implements ``Ledger``."""

    def __init__(self, ledger: Ledger, life: Life) -> None:
        self._ledger = ledger
        self._life = life

    def __getattr__(self, name: str) -> Any:  # other methods, such as find_expired
        return getattr(self._ledger, name)

    def __repr__(self) -> str:
        return repr(self._ledger)

    def acquire(self, message_id: str, **options: Any) -> Acquisition:
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
        self._ledger.complete(lease, result)
        self._life.reach("completed")
