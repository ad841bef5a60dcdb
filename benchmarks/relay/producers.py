"""Producers in Python, in processes and threads of their own: a business update and a publish, transaction for each."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from benchmarks.consumer.clients import handle
from benchmarks.relay.outbox import BODY, DESTINATION
from benchmarks.shared.database import ACCOUNTS, SCHEMA
from benchmarks.shared.work import Rate, in_processes, in_threads, ready, together
from txbox import Message
from txbox.outbox import Outbox, Outgoing

PROCESSES, CONNECTIONS = 2, 16
"""Sixteen producers, in more than one process to be worth the name."""

FEED_BATCH, AHEAD, FEED_WAIT_SECONDS = 500, 50_000, 0.002
"""Of a feed: messages in a transaction, and how far it may be ahead of the relays."""


def produce(
    url: str, seconds: float, *, notify: bool = True, rate: float | None = None
) -> tuple[Rate, dict[int, float]]:
    """Run producers to their end.

    Args:
        url: the database.
        seconds: for how long, after a short warm-up.
        notify: whether they notify the relay.
        rate: transactions a second of all of them together; None: as many as they can.

    Returns:
        What they did, in transactions; and if there is a rate, when each commit had returned, by ``time.monotonic``, by
        the number that is its message's body.
    """
    results = in_processes(PROCESSES, _produce, url, seconds, notify, rate)
    commits = {number: moment for _, commits in results for number, moment in commits.items()}
    return together([one for one, _ in results]), commits


def feed(url: str, count: int, sent: Any) -> None:
    """Publish many messages in batches, and wait whenever more than ``AHEAD`` of them are not yet sent."""
    engine, outbox = create_engine(url), Outbox(schema=SCHEMA)
    for start in range(0, count, FEED_BATCH):
        while start - sent.value > AHEAD:
            time.sleep(FEED_WAIT_SECONDS)
        with engine.begin() as connection:
            messages = [Outgoing(DESTINATION, BODY) for _ in range(start, min(start + FEED_BATCH, count))]
            outbox.publish_many(connection, messages)
    engine.dispose()


def _produce(process: int, url: str, seconds: float, notify: bool, rate: float | None) -> tuple[Rate, dict[int, float]]:
    """One process's producers; they take turns where there is a rate."""
    threads = CONNECTIONS // PROCESSES
    engine = create_engine(url, pool_size=threads, max_overflow=0)
    outbox, commits = Outbox(schema=SCHEMA, notify=notify), dict[int, float]()
    for connection in [engine.connect() for _ in range(threads)]:
        connection.close()  # it stays in the pool

    @contextmanager
    def client(thread: int) -> Iterator[Callable[[], int]]:
        mine, generator = process * threads + thread, random.Random(thread)
        messages = [Message("unused", str(generator.randint(1, ACCOUNTS)).encode()) for _ in range(1_000)]
        number, due = mine << 40, time.monotonic() + mine / (rate or 1)

        def step() -> int:
            nonlocal number, due
            number += 1
            if rate is not None:
                time.sleep(max(due - time.monotonic(), 0.0))
                due += CONNECTIONS / rate
            with Session(engine) as session, session.begin():
                handle(session, messages[number % len(messages)])
                outbox.publish(session, DESTINATION, BODY if rate is None else str(number))
            if rate is not None:
                commits[number] = time.monotonic()
            return 1

        yield step

    ready()
    done = in_threads(threads, client, seconds)
    engine.dispose()
    return done, commits
