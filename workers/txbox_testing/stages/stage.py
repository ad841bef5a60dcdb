"""The stage: where lives of workers or relays begin and end, and what a fault does to them."""

import asyncio
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, Self

from sqlalchemy import Engine, event

from txbox import TxboxError
from txbox.instrumentation import Event
from txbox_local.tcp_proxy import TcpProxy
from txbox_testing.database import TrialDatabase
from txbox_testing.stages.life import Gate, Life, statements_watched

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # which needs greenlet

CHECK_SECONDS = 0.002


class NotSettled(TxboxError):
    """What a test delivered or published was not settled in time."""


class Stoppable(Protocol):
    """A service that a stage runs."""

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""

    def start(self) -> None:
        """Start, and return."""

    def stop(self, timeout: float) -> bool:
        """Finish what was begun. Return whether that ended in time."""


class Stage(ABC):
    """Runs services, to which a fault may happen, until there is nothing left to do.

    Attributes:
        engine: the database.
        engines: others that its services use.
        database: the same database, seen by the trial.
        timeout: seconds that each step may take.
        lives: its services' lives, the first one first.
        events: what the services have emitted.
    """

    def __init__(self, engine: "Engine | AsyncEngine", database: TrialDatabase, timeout: float) -> None:
        self.engine = sync_engine(engine)
        self.engines: set[Engine] = set()
        self.timeout = timeout
        self.lives: list[Life] = []
        self.events: list[Event] = []
        self.database = database
        self._services: dict[Life, Stoppable] = {}
        self._watching = contextlib.ExitStack()

    @abstractmethod
    def make(self, life: Life) -> Stoppable:
        """Make the service of a life."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether there is nothing left to do."""

    def redeliver(self) -> None:  # noqa: B027 - for a relay, Postgres does that by itself
        """Redeliver what a killed service has not settled."""

    def start(self, *gates: Gate) -> Life:
        """Start a service, and return its life with these gates."""
        life = Life(*gates)
        service = self.make(life)
        service.start()
        self.lives.append(life)
        self._services[life] = service
        return life

    def reaches(self, gate: Gate) -> bool:
        """Wait until the gate holds a thread, or until all is done. Return whether it holds one."""
        self.wait_until(lambda: gate.reached.is_set() or self.is_done())
        return gate.reached.is_set()

    def wait_until(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait for a condition. Return whether it was met in time."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(CHECK_SECONDS)
        return True

    def kill(self, life: Life) -> None:
        """Declare a service dead that a gate holds: its sessions end, and what it has not settled is redelivered."""
        life.dead = True
        self.cut()
        self.redeliver()

    def cut(self) -> None:
        """End all sessions, and empty the pools, as a new process's are empty."""
        self.database.end_sessions()
        self._dispose()

    def settle(self) -> None:
        """Let a service without a fault do what is left.

        Raises:
            NotSettled: it was not done in time.
        """
        life = self.start()
        self.await_done()
        self.stop(life)

    def await_done(self) -> None:
        """Wait until there is nothing left to do. Raise ``NotSettled`` if that takes too long."""
        if not self.wait_until(self.is_done):
            errors = [error for each in self.events if (error := getattr(each, "error", None)) is not None]
            raise NotSettled(f"not settled within {self.timeout:g} s" + (f": {errors[-1]!r}" if errors else ""))

    def stop(self, life: Life) -> None:
        """Stop a service, and wait until it has stopped."""
        self._services.pop(life).stop(self.timeout)

    def __enter__(self) -> Self:
        self._watching.enter_context(statements_watched())
        return self

    def __exit__(self, *_: object) -> None:
        """End all services, and what a gate still holds."""
        for life in self._services:
            life.dead = True
        stops = [threading.Thread(target=service.stop, args=(self.timeout,)) for service in self._services.values()]
        with self._watching, quiet():  # what the killed ones still log is of no use
            for stop in stops:
                stop.start()
            self.wait_until(lambda: all(service.stopping for service in self._services.values()))
            for life in self._services:
                life.over.set()
                for gate in life.gates:
                    gate.release(kill=True)
            if self._services:
                self.database.end_sessions()  # also that of a handler that waits in Postgres
            for stop in stops:
                stop.join()
        self._services.clear()
        self._dispose()

    def _dispose(self) -> None:
        for engine in {self.engine, *self.engines, *(engine for life in self.lives for engine in life.engines)}:
            dispose(engine)


def sync_engine(engine: "Engine | AsyncEngine") -> Engine:
    """Return an engine, or the one below an engine for coroutines."""
    return engine if isinstance(engine, Engine) else engine.sync_engine


def dispose(engine: Engine) -> None:
    """Close an engine's connections; for an async engine, on an event loop in a thread of its own."""
    if engine.dialect.is_async:
        from sqlalchemy.ext.asyncio import AsyncEngine

        in_thread = threading.Thread(target=lambda: asyncio.run(AsyncEngine(engine).dispose()))
        in_thread.start()
        in_thread.join()
    else:
        pool = engine.pool
        engine.dispose()
        # A connection in use now, for instance by a report, returns to the old pool, which would leave it open.
        event.listen(pool, "checkin", _close)
        pool.dispose()


def _close(connection: Any, _record: Any) -> None:
    if connection is not None:
        connection.close()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While entered, silence txbox's log. The faults are wanted, and what services say of them helps no one."""
    logger = logging.getLogger("txbox")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def through_proxy(engine: Engine, address: tuple[str, int]) -> Iterator[TcpProxy]:
    """While entered, send an engine's new connections through a proxy that can lose what they say."""
    with TcpProxy(*address) as proxy:

        def redirect(_dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, Any]) -> None:
            parameters.update(hostaddr="127.0.0.1", port=proxy.port)  # the host stays: certificates are for it

        dispose(engine)
        event.listen(engine, "do_connect", redirect, insert=True)
        try:
            yield proxy
        finally:
            event.remove(engine, "do_connect", redirect)
            dispose(engine)
