"""The stage of a delivery: a broker, workers that come and go, and what became of each delivery."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from sqlalchemy import Engine, event

from txbox import Inbox, InvalidConfiguration, Message, SqlEffect, TxboxError
from txbox.instrumentation import Event, Settled
from txbox.service import Service
from txbox_local.tcp_proxy import TcpProxy
from txbox_testing.broker import Broker, Consumer
from txbox_testing.database import TrialDatabase
from txbox_testing.gate import Gate
from txbox_testing.life import Life, WatchedLedger, statements_watched
from txbox_workers.worker import Worker

RECEIVE_SECONDS = 0.01
"""How long the broker is asked for something that is not there; a worker that stops waits for it."""

LEASE_SECONDS = 0.5
"""How long a killed worker's lease keeps its message, unless the options say something else."""

CHECK_SECONDS = 0.002


class NotSettled(TxboxError):
    """The messages of a trial were not settled in time."""


class Stage:
    """Has messages processed by real workers, which a fault may befall.

    Attributes:
        settled: what became of each delivery, in this order, over all lives.
        lives: of its workers, the first one first.
    """

    def __init__(
        self,
        handler: Callable[..., Any] | SqlEffect,
        messages: Sequence[Message],
        *,
        engine: Engine,
        database: TrialDatabase,
        timeout: float,
        batch: bool,
        options: Mapping[str, Any],
    ) -> None:
        if not messages:
            raise InvalidConfiguration("there is no message to deliver")
        self._handler = handler
        self.messages = messages
        self.engine = engine
        self._database = database
        self.timeout = timeout
        self._kind = "effect" if isinstance(handler, SqlEffect) else "batch_handler" if batch else "handler"
        self._options = {"lease_seconds": LEASE_SECONDS, **options}
        if self._options.get("inbox", _NOT_GIVEN) is _NOT_GIVEN:
            self._options["inbox"] = Inbox("test")
        self.broker = Broker(messages, batch_size=max(len(messages), 1), wait_seconds=RECEIVE_SECONDS, name="test")
        self.settled: list[Settled] = []
        self.lives: list[Life] = []
        self._workers: dict[Life, tuple[Service, Consumer]] = {}

    def start(self, *gates: Gate, loses_ack: bool = False) -> Life:
        """Start a worker; return its life, which stops at these gates."""
        life = Life(*gates)
        consumer = Consumer(self.broker, life)
        consumer.loses_ack = loses_ack
        options = dict(self._options)
        handler = self._handler
        options[self._kind] = handler if isinstance(handler, SqlEffect) else life.watch(handler)
        if options.get("ledger") is not None:
            options["ledger"] = WatchedLedger(options["ledger"], life)
        if options["inbox"] is not None:
            options["engine"] = self.engine
        options["hooks"] = [*options.get("hooks", ()), self._note]
        worker = worker_class(handler)(consumer, **options)
        worker.start()
        self.lives.append(life)
        self._workers[life] = worker, consumer
        return life

    def consumer(self, life: Life) -> Consumer:
        """Return what that worker sees of the broker."""
        return self._workers[life][1]

    def reaches(self, gate: Gate) -> bool:
        """Wait until a gate holds a thread, and return True; or until all is settled, which never came there."""
        return self.wait_until(lambda: gate.reached.is_set() or self.broker.wait_until_empty(0)) and (
            gate.reached.is_set()
        )

    def wait_until(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait for a condition; return whether it came in time."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(CHECK_SECONDS)
        return True

    def kill(self, life: Life) -> None:
        """Let a worker that a gate holds be dead: its sessions end, and the broker delivers again."""
        life.dead = True
        self.cut(life)
        self.broker.end_visibility()

    def cut(self, *lives: Life) -> None:
        """End all sessions, and have the pools forget theirs, as those of a new process are empty."""
        self._database.end_sessions()
        for engine in {self.engine, *(engine for life in lives for engine in life.engines)}:
            engine.dispose()

    def settle(self) -> None:
        """Let a worker that nothing befalls settle what there is.

        Raises:
            NotSettled: it could not, in time.
        """
        life = self.start()
        self.await_settled()
        self.stop(life)

    def await_settled(self) -> None:
        """Wait until every message is acked; raises ``NotSettled`` if that takes too long."""
        if not self.broker.wait_until_empty(self.timeout):
            last = next((each.error for each in reversed(self.settled) if each.error is not None), None)
            why = "" if last is None else f"; the last error: {type(last).__name__}: {last}"
            raise NotSettled(f"not settled within {self.timeout:g} s{why}")

    def stop(self, life: Life) -> None:
        """Stop a worker, and wait until it has."""
        worker, _consumer = self._workers.pop(life)
        worker.stop(self.timeout)

    def end(self) -> None:
        """End what still stands at a gate, and all workers."""
        workers = list(self._workers.items())
        for life, _ in workers:
            life.dead = True
        stoppers = [threading.Thread(target=worker.stop, args=(self.timeout,)) for _, (worker, _) in workers]
        with quiet():  # what a killed worker still says
            for stopper in stoppers:
                stopper.start()
            for life, (worker, _) in workers:
                self.wait_until(lambda worker=cast(Service, worker): worker.stopping)
                for gate in life.gates:
                    gate.release(kill=True)
            for stopper in stoppers:
                stopper.join()
        self._workers.clear()
        for engine in {self.engine, *(engine for life in self.lives for engine in life.engines)}:
            engine.dispose()

    def _note(self, happened: Event) -> None:
        if isinstance(happened, Settled):
            self.settled.append(happened)


@contextlib.contextmanager
def staged(handler: Callable[..., Any] | SqlEffect, messages: Sequence[Message], **arguments: Any) -> Iterator[Stage]:
    """Set a stage, and clear it at the end."""
    stage = Stage(handler, messages, **arguments)
    with statements_watched():
        try:
            yield stage
        finally:
            stage.end()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While entered: txbox logs nothing; the faults are wanted, and what workers say of them helps no one."""
    logger = logging.getLogger("txbox")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def worker_class(handler: object) -> type[Worker]:  # noqa: ARG001 - the place where a coroutine function gets its own
    """Return the worker that runs such a handler."""
    return Worker


@contextlib.contextmanager
def through_proxy(engine: Engine) -> Iterator[TcpProxy]:
    """While entered: new connections of an engine pass through a proxy, which can lose what they say."""
    host, port = engine.url.host or "127.0.0.1", engine.url.port or 5432

    with TcpProxy(host, port) as proxy:

        def redirect(_dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, Any]) -> None:
            parameters.update(host="127.0.0.1", port=proxy.port)

        engine.dispose()
        event.listen(engine, "do_connect", redirect, insert=True)
        try:
            yield proxy
        finally:
            event.remove(engine, "do_connect", redirect)
            engine.dispose()


def plural(number: int, what: str) -> str:
    """Return a number with its noun: 1 row, 2 rows."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def described(values: Iterable[str], most: int = 3) -> str:
    """Return values for a line of a report: a few of them, and how many more."""
    listed = list(values)
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return "; ".join(listed[:most]) + rest


_NOT_GIVEN = object()
