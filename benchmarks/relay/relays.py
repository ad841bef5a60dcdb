"""Relays in processes of their own, watched from outside: how much they send, what they take of the machine."""

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import psutil
import psycopg
from sqlalchemy import create_engine

from benchmarks.shared.database import SCHEMA, conninfo
from benchmarks.shared.measurements import WrongResult
from txbox.relay import OutboxMessage, Refused, Relay
from txbox.relay.poller import POLL_SECONDS

ENDING_SECONDS = 60.0
PATIENCE_SECONDS = 600.0
GLANCE_SECONDS = 0.005

SLOW_SECONDS = 0.2
"""After which a slow destination answers."""

SLOW_SENDERS = 32
"""Threads, each with a connection, of the relay that has a thread for each call."""


class Relays:
    """Some relay processes, while they run; ``sent`` counts the messages that their publishers have taken."""

    def __init__(
        self, url: str, processes: int = 1, *, claim: str | None = None, timed: bool = False, slow: str | None = None
    ) -> None:
        """Prepare processes, to be started within ``with``; what runs at its end is ended.

        Args:
            url: the database.
            processes: how many.
            claim: no relay at all but this statement, again and again: the limit.
            timed: remember when what arrived.
            slow: its destinations answer after ``SLOW_SECONDS``; "async" awaits them, "threads" has a thread for each.
        """
        context = multiprocessing.get_context("spawn")
        self._ready, self._stop = context.Barrier(processes + 1), context.Event()
        self._results, self.sent = context.Queue(), context.Value("q", 0)
        arguments = (url, claim, self._ready, self._stop, self.sent, self._results, timed)
        work = _run_claims if claim else partial(_run_relay, slow)
        self._processes = [context.Process(target=work, args=arguments) for _ in range(processes)]

    def __enter__(self) -> "Relays":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.is_alive():
                process.terminate()
                process.join()

    def start(self) -> float:
        """Start them; return when all have connected and are about to look for messages, by ``time.perf_counter``."""
        for process in self._processes:
            process.start()
        self._ready.wait(ENDING_SECONDS)
        return time.perf_counter()

    def stop(self) -> dict[str, float]:
        """Have them finish; returns when the messages arrived, by body, where that was remembered."""
        self._stop.set()
        arrivals: dict[str, float] = {}
        for _ in self._processes:
            arrivals |= self._results.get(timeout=2 * ENDING_SECONDS)
        for process in self._processes:
            process.join(ENDING_SECONDS)
        return arrivals

    def wait_for(self, count: int) -> float:
        """Wait until so many messages have been taken; return when that was, by ``time.perf_counter``.

        Raises:
            WrongResult: it took too long, or a relay has died.
        """
        deadline = time.perf_counter() + PATIENCE_SECONDS
        while (taken := self.sent.value) < count:
            if time.perf_counter() > deadline or not all(process.is_alive() for process in self._processes):
                raise WrongResult(f"the relays took {taken} of {count} messages, then no more")
            time.sleep(GLANCE_SECONDS)
        return time.perf_counter()

    def cpu_seconds(self) -> float:
        """Processor time of all of them, in seconds."""
        return sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process in self._processes)


class _Taking:
    """A publisher that takes everything, counts, and remembers when each body arrived if it is asked to."""

    def __init__(self, sent: Any, timed: bool) -> None:
        self._sent = sent
        self._timed = timed
        self.arrivals: dict[str, float] = {}

    def take(self, bodies: Sequence[bytes]) -> None:
        if self._timed:
            now = time.monotonic()
            self.arrivals |= {bytes(body).decode(): now for body in bodies}
        with self._sent.get_lock():
            self._sent.value += len(bodies)

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        self.take([message.body for message in messages])
        return ()


class _Slow(_Taking):
    """The same, where each destination answers after a while."""

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        time.sleep(SLOW_SECONDS)
        return super().send(messages)


class _AsyncSlow(_Taking):
    """The same, and the answer is awaited."""

    async def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:  # type: ignore[override]
        await asyncio.sleep(SLOW_SECONDS)
        return super().send(messages)


PUBLISHERS = {None: _Taking, "threads": _Slow, "async": _AsyncSlow}


def _run_claims(url: str, claim: str, ready: Any, stop: Any, sent: Any, results: Any, timed: bool) -> None:
    """Take what is there by one statement, and look again after some milliseconds when there was nothing."""
    publisher = _Taking(sent, timed)
    with psycopg.connect(conninfo(url)) as connection:
        connection.execute("SET synchronous_commit = off")  # as a relay does
        connection.commit()
        cursor, statement = connection.cursor(), claim.encode()
        ready.wait(ENDING_SECONDS)
        while not stop.is_set() and _parent_lives():
            bodies = [body for (body,) in cursor.execute(statement, prepare=True)]
            connection.commit()
            publisher.take(bodies)
            if not bodies:
                time.sleep(POLL_SECONDS)
    results.put(publisher.arrivals)


def _run_relay(
    slow: str | None, url: str, _claim: None, ready: Any, stop: Any, sent: Any, results: Any, timed: bool
) -> None:
    publisher = PUBLISHERS[slow](sent, timed)
    senders = SLOW_SENDERS if slow == "threads" else 4
    engine = create_engine(url, pool_size=senders + 8)
    with engine.connect():
        relay = Relay(engine, {"benchmark": publisher}, schema=SCHEMA, senders=senders)
    ready.wait(ENDING_SECONDS)
    relay.start()
    while not stop.wait(1.0) and _parent_lives():
        pass
    if not relay.stop(ENDING_SECONDS):
        raise RuntimeError("the relay did not finish")
    results.put(publisher.arrivals)
    engine.dispose()


def _parent_lives() -> bool:
    """A parent that was killed does not say stop."""
    parent = multiprocessing.parent_process()
    return parent is not None and parent.is_alive()
