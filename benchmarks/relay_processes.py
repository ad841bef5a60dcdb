"""Relays in processes of their own, watched from outside: how much they send, what they take of the machine."""

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import psycopg
from business import SCHEMA, WrongResult, conninfo
from relay_place import BARE_CLAIM, RAW_CLAIM
from sqlalchemy import create_engine

from txbox.relay import OutboxMessage, Publisher, Refused, Relay
from txbox.relay.poller import POLL_SECONDS

__all__ = ["RelayOrder", "Relays", "drain_raw", "relays"]

ENDING_SECONDS = 60.0
GLANCE_SECONDS = 0.005


@dataclass(frozen=True)
class RelayOrder:
    """What a relay is to be.

    Attributes:
        url: the database.
        publisher: "null": takes everything and does nothing; "timed": remembers when what arrived; "aws": the real one;
            "bare": no relay at all, but the limit of every one that polls, timed too.
        options: further arguments of ``Relay``.
        environment: variables to set before anything is made.
    """

    url: str
    publisher: str = "null"
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class Relays:
    """Some relay processes, while they run."""

    def __init__(self, orders: Sequence[RelayOrder]) -> None:
        """Prepare one process for each order."""
        context = multiprocessing.get_context("spawn")
        self._ready = context.Barrier(len(orders) + 1)
        self._stop = context.Event()
        self._results = context.Queue()
        self.sent = context.Value("q", 0)
        """How many messages the publishers have taken."""
        self._processes: list[BaseProcess] = [
            context.Process(target=_run_relay, args=(order, self._ready, self._stop, self.sent, self._results))
            for order in orders
        ]

    def start(self) -> None:
        """Start them, and return when each has connected and is about to look for the first time."""
        for process in self._processes:
            process.start()
        self._ready.wait(ENDING_SECONDS)

    def stop(self) -> dict[str, float]:
        """Have them finish; returns when the messages arrived, by body, where that was remembered."""
        self._stop.set()
        arrivals: dict[str, float] = {}
        for _ in self._processes:
            arrivals |= self._results.get(timeout=2 * ENDING_SECONDS)
        for process in self._processes:
            process.join(ENDING_SECONDS)
        return arrivals

    def end(self) -> None:
        """See that none is left."""
        for process in self._processes:
            if process.is_alive():
                process.terminate()
                process.join()

    def wait_for(self, count: int, seconds: float) -> float:
        """Wait until so many messages have been taken; return when that was, by ``time.perf_counter``.

        Raises:
            WrongResult: it took too long, or a relay has died.
        """
        deadline = time.perf_counter() + seconds
        while (taken := self.sent.value) < count:
            if time.perf_counter() > deadline or not all(process.is_alive() for process in self._processes):
                raise WrongResult(f"the relays took {taken} of {count} messages, then no more")
            time.sleep(GLANCE_SECONDS)
        return time.perf_counter()

    def memory_mib(self) -> float:
        """What the first process holds in memory, in MiB; 0 where /proc does not tell."""
        try:
            pages = int(Path(f"/proc/{self._processes[0].pid}/statm").read_text().split()[1])
        except OSError:
            return 0.0
        return float(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    def cpu_seconds(self) -> float:
        """Processor time of all of them, in seconds; 0 where /proc does not tell."""
        total = 0
        for process in self._processes:
            try:
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")


@contextmanager
def relays(order: RelayOrder, processes: int = 1) -> Iterator[Relays]:
    """Run relays: ``start`` them within; what runs at the end is ended."""
    running = Relays([order] * processes)
    try:
        yield running
    finally:
        running.end()


def drain_raw(url: str, processes: int) -> float:
    """Empty the limit's table by plain deletes over psycopg, without sending anything; return messages a second."""
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(processes)
    with ProcessPoolExecutor(processes, context, _remember, (ready,)) as pool:
        told = [future.result() for future in [pool.submit(_drain_raw, url) for _ in range(processes)]]
    begun, ended = min(one.begun for one in told), max(one.ended for one in told)
    return sum(one.count for one in told) / (ended - begun)


# --- in a process of its own -----------------------------------------------------------------------------------------


class _Taking:
    """A publisher that takes everything, and counts."""

    def __init__(self, sent: Any) -> None:
        self._sent = sent

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        with self._sent.get_lock():
            self._sent.value += len(messages)
        return ()


class _Timing(_Taking):
    """The same, and it remembers when each body arrived."""

    def __init__(self, sent: Any) -> None:
        super().__init__(sent)
        self.arrivals: dict[str, float] = {}

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        now = time.monotonic()
        for message in messages:
            self.arrivals.setdefault(message.body.decode(), now)
        return super().send(messages)


class _Counting:
    """Counts what another publisher has sent."""

    def __init__(self, publisher: Publisher, sent: Any) -> None:
        self._publisher = publisher
        self._sent = sent

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        refused = self._publisher.send(messages)
        with self._sent.get_lock():
            self._sent.value += len(messages) - len(refused)
        return refused


def _run_bare(url: str, ready: Any, stop: Any, sent: Any, results: Any) -> None:
    """Take what is there by one statement, every few milliseconds: no lanes, no order, nothing sent."""
    arrivals: dict[str, float] = {}
    with psycopg.connect(conninfo(url)) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.commit()
        cursor, statement = connection.cursor(), BARE_CLAIM.encode()
        ready.wait(ENDING_SECONDS)
        while not stop.wait(POLL_SECONDS) and multiprocessing.parent_process().is_alive():  # type: ignore[union-attr]
            rows = cursor.execute(statement, prepare=True).fetchall()
            now = time.monotonic()
            connection.commit()
            arrivals |= {bytes(body).decode(): now for (body,) in rows}
            with sent.get_lock():
                sent.value += len(rows)
    results.put(arrivals)


def _run_relay(order: RelayOrder, ready: Any, stop: Any, sent: Any, results: Any) -> None:
    if order.publisher == "bare":
        _run_bare(order.url, ready, stop, sent, results)
        return
    os.environ.update(order.environment)
    timing = _Timing(sent)
    publishers: dict[str, Publisher]
    if order.publisher == "aws":
        from txbox_aws.publishers import aws_publishers

        publishers = {name: _Counting(publisher, sent) for name, publisher in aws_publishers().items()}
    else:
        publishers = {"benchmark": timing if order.publisher == "timed" else _Taking(sent)}
    engine = create_engine(order.url, pool_size=12)
    with engine.connect():
        relay = Relay(engine, publishers, schema=SCHEMA, **order.options)
    ready.wait(ENDING_SECONDS)
    relay.start()
    # The parent may be killed; then nobody says stop.
    while not stop.wait(1.0) and multiprocessing.parent_process().is_alive():  # type: ignore[union-attr]
        pass
    if not relay.stop(ENDING_SECONDS):
        raise RuntimeError("the relay did not finish")
    results.put(timing.arrivals)
    engine.dispose()


@dataclass(frozen=True)
class _Drained:
    count: int
    begun: float
    ended: float


_barriers: list[Barrier] = []


def _remember(barrier: Barrier) -> None:
    _barriers.append(barrier)


def _drain_raw(url: str) -> _Drained:
    with psycopg.connect(conninfo(url)) as connection:
        connection.execute("SET synchronous_commit = off")  # as a relay does
        connection.commit()
        cursor, statement = connection.cursor(), RAW_CLAIM.encode()
        _barriers[0].wait(ENDING_SECONDS)
        begun, count = time.perf_counter(), 0
        while rows := cursor.execute(statement, prepare=True).fetchall():
            connection.commit()
            count += len(rows)
        return _Drained(count, begun, time.perf_counter())
