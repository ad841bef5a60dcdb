"""A worker that processes messages at a steady rate, in a process of its own: how long each one waits."""

import multiprocessing
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

from sqlalchemy import create_engine

from benchmarks.shared.database import SCHEMA, SUBSCRIBER
from benchmarks.shared.effects import update_many
from txbox import Inbox, Message, SqlEffect
from txbox_workers.delivery import Delivery
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

RATE = 100
"""Messages a second."""

MESSAGES = 20_000
"""More than are sent while a load runs."""

THREADS = 4
WARM_UP_SECONDS = 2.0
START_SECONDS = 60.0
DRAIN_SECONDS = 60.0

EFFECT = update_many("SELECT account_id, sum(cents) FROM fresh_event GROUP BY account_id")
"""What a chunk and a batch apply: both lock the accounts in one order, so they meet in no deadlock."""


class Waits(NamedTuple):
    """How many messages were sent, and what those after the warm-up have waited for their acknowledgement, in ms."""

    sent: int
    p99: float
    longest: float

    @classmethod
    def of(cls, sent: int, waits: Sequence[float]) -> "Waits":
        """Describe waits in seconds."""
        found = sorted(1000 * one for one in waits)
        return cls(sent, found[int(len(found) * 0.99)], found[-1])


class TimedSource(MemorySource):
    """Remembers when each message was acknowledged for the first time."""

    def __init__(self) -> None:
        super().__init__(name="beside")
        self.acked_at: dict[str, float] = {}

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        """Forget deliveries."""
        now = time.monotonic()
        for delivery in deliveries:
            self.acked_at.setdefault(delivery.message.id, now)
        return super().ack(deliveries)


@contextmanager
def worker_beside(url: str, messages: Sequence[tuple[str, int, int]]) -> Iterator[list[Waits]]:
    """Run a worker until the block ends; then the list that it gives has its waits.

    Args:
        url: the database, as SQLAlchemy writes it.
        messages: id, account and cents of each; when they are used up, the worker idles.
    """
    context = multiprocessing.get_context("spawn")
    started, stopping, results = context.Event(), context.Event(), context.SimpleQueue()
    process = context.Process(target=_work, args=(url, messages, started, stopping, results))
    process.start()
    try:
        if not started.wait(START_SECONDS):
            raise RuntimeError("the worker did not start")
        found: list[Waits] = []
        yield found
        stopping.set()
        found.append(Waits.of(*results.get()))
    finally:
        stopping.set()
        process.join()


def _work(url: str, messages: Sequence[tuple[str, int, int]], started: Event, stopping: Event, results: Any) -> None:
    source, engine, due = TimedSource(), create_engine(url, pool_size=THREADS), {}
    effect = SqlEffect.of(EFFECT, fields="account_id bigint not null, cents bigint not null")
    worker = Worker(source, inbox=Inbox(SUBSCRIBER, schema=SCHEMA), engine=engine, effect=effect, threads=THREADS)
    worker.start()
    began = time.monotonic()
    measured_from = began + WARM_UP_SECONDS
    pause = threading.Event()
    for number, (message_id, account, cents) in enumerate(messages):
        at = began + number / RATE
        pause.wait(max(0.0, at - time.monotonic()))
        if at >= measured_from:
            started.set()
            due[message_id] = at
        if stopping.is_set():
            break
        source.send(Message(message_id, b'{"account_id": %d, "cents": %d}' % (account, cents)))
    stopping.wait()
    drained = source.wait_until_empty(DRAIN_SECONDS) and worker.stop()
    waits = [source.acked_at[one] - at for one, at in due.items() if one in source.acked_at]
    results.put((len(source.acked_at), waits if drained else []))
    engine.dispose()
