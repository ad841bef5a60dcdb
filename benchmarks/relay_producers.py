"""Producers in Python: the same handler with and without a publish, in threads and processes of their own."""

import gc
import itertools
import multiprocessing
import random
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from typing import Any

from business import ACCOUNTS, SCHEMA
from consumer_roads import handle
from relay_place import BODY, DESTINATION
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from txbox import Message
from txbox.outbox import Outbox, Outgoing

__all__ = ["Produced", "Production", "feed", "produce"]

WARM_UP_SECONDS = 0.4
FEED_WAIT_SECONDS = 0.002


@dataclass(frozen=True)
class Production:
    """What producers do.

    Attributes:
        publish: whether each transaction publishes a message beside its business update.
        ring: whether the bell is rung.
        connections: all in all; each has a thread.
        processes: which share the connections evenly.
        seconds: for how long, after a short warm-up.
        rate: transactions a second of all of them together; None: as many as they can.
        timed: return when each transaction's commit had returned.
    """

    url: str
    publish: bool
    connections: int
    processes: int
    seconds: float
    ring: bool = True
    rate: float | None = None
    timed: bool = False


@dataclass(frozen=True)
class Produced:
    """What one process has done.

    Attributes:
        rate: transactions a second, between warm-up and end.
        cpu_us: the client's processor time for one.
        transactions: warm-up included.
        begun: when the warm-up was over, by ``time.monotonic``, which is one clock for all processes of a machine.
        commits: if asked for, by the number that is the message's body: when its commit had returned, by that clock.
    """

    rate: float
    cpu_us: float
    transactions: int
    begun: float
    commits: dict[int, float] = field(default_factory=dict)


def produce(production: Production) -> list[Produced]:
    """Run producers to their end; one result for each process."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(production.processes)
    with ProcessPoolExecutor(production.processes, context, _remember, (barrier,)) as pool:
        futures = [pool.submit(_measure, production, number) for number in range(production.processes)]
        return [future.result() for future in futures]


def feed(url: str, count: int, batch: int, ahead: int, sent: Any) -> None:
    """Publish many messages in batches, and wait whenever the relays fall behind.

    Args:
        url: the database.
        count: how many messages.
        batch: messages of one transaction.
        ahead: so many may be published and not yet sent.
        sent: a shared number: how many have been sent.
    """
    engine, outbox = create_engine(url), Outbox(schema=SCHEMA)
    for start in range(0, count, batch):
        while start - sent.value > ahead:
            time.sleep(FEED_WAIT_SECONDS)
        with engine.begin() as connection:
            outbox.publish_many(
                connection, (Outgoing(DESTINATION, BODY) for _ in range(start, min(start + batch, count)))
            )
    engine.dispose()


# --- in a process of its own -----------------------------------------------------------------------------------------

_barriers: list[Barrier] = []


def _remember(barrier: Barrier) -> None:
    _barriers.append(barrier)


@dataclass
class _Counted:
    transactions: int = 0
    numbers: "array[int]" = field(default_factory=lambda: array("q"))
    moments: "array[float]" = field(default_factory=lambda: array("d"))


def _measure(production: Production, process: int) -> Produced:
    threads = max(production.connections // production.processes, 1)
    engine = create_engine(production.url, pool_size=threads, max_overflow=0)
    outbox = Outbox(schema=SCHEMA, notify=production.ring)
    stopping, troubles = threading.Event(), []
    counted = [_Counted() for _ in range(threads)]
    started = threading.Barrier(threads + 1)

    def loop(thread: int) -> None:
        mine, generator = counted[thread], random.Random(thread)
        number = itertools.count((process * threads + thread) << 40)
        pause = _pauses(production, process * threads + thread)
        message = [Message("unused", str(generator.randint(1, ACCOUNTS)).encode()) for _ in range(1_000)]
        with engine.connect():  # so that nobody pays for connecting
            started.wait()
        while not stopping.is_set():
            pause()
            own = next(number)
            with Session(engine) as session, session.begin():
                handle(session, message[mine.transactions % len(message)])
                if production.publish:
                    outbox.publish(session, DESTINATION, str(own) if production.timed else BODY)
            if production.timed:
                mine.moments.append(time.monotonic())
                mine.numbers.append(own)
            mine.transactions += 1

    def guarded(thread: int) -> None:
        try:
            loop(thread)
        except BaseException as error:
            troubles.append(error)
            started.abort()
            raise

    running = [threading.Thread(target=guarded, args=(thread,)) for thread in range(threads)]
    gc.collect()
    gc.freeze()
    _barriers[0].wait()
    for thread in running:
        thread.start()
    started.wait()
    time.sleep(WARM_UP_SECONDS)
    warm = time.monotonic()
    before, cpu, begun = sum(mine.transactions for mine in counted), time.process_time(), time.perf_counter()
    time.sleep(production.seconds)
    done = sum(mine.transactions for mine in counted) - before
    rate = done / (time.perf_counter() - begun)
    cpu_us = (time.process_time() - cpu) / max(done, 1) * 1e6
    stopping.set()
    for thread in running:
        thread.join()
    engine.dispose()
    if troubles:
        raise troubles[0]
    commits = {number: moment for mine in counted for number, moment in zip(mine.numbers, mine.moments, strict=True)}
    return Produced(rate, cpu_us, sum(mine.transactions for mine in counted), warm, commits)


def _pauses(production: Production, thread: int) -> Callable[[], None]:
    """Return what has a thread wait until its next transaction is to begin; threads take turns."""
    if production.rate is None:
        return lambda: None
    interval = production.connections / production.rate
    due = time.monotonic() + interval * thread / production.connections

    def pause() -> None:
        nonlocal due
        time.sleep(max(due - time.monotonic(), 0.0))
        due += interval

    return pause
