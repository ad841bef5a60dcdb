"""The memory's benchmark: what a worker's process holds after a million messages, against after ten thousand."""

import os
import random
import threading
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from benchmarks.consumer.deliveries import IDLE_SECONDS, PreparedSource
from benchmarks.shared.database import ACCOUNTS, SCHEMA, SUBSCRIBER
from benchmarks.shared.effects import EFFECT, add_to_all
from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run
from benchmarks.shared.work import in_processes
from txbox import Inbox, Message
from txbox_workers.delivery import Delivery
from txbox_workers.worker import Worker

OF_FIRST = 1.2
"""The target, as a ratio."""

RECEIVED_AT_ONCE, BATCH, PREFETCH, THREADS = 10, 100, 1_000, 2
SHARES = (0.01, *(tenth / 10 for tenth in range(1, 11)))
STALLED_SECONDS = 60.0

DESCRIPTION = """\
One process with a worker that receives ahead and works in batches of a hundred, by an effect
in SQL, and by a batch_handler. Its source makes each message when it is asked for it, and keeps
none. The process's resident memory is read after 1 % of the messages, after each tenth, and at
the end. Records and balances are checked. Linux only.
"""


class MadeSource(PreparedSource):
    """A source that makes each delivery when it is asked for it, and forgets it."""

    def __init__(self, count: int) -> None:
        """Make so many, each of another message."""
        super().__init__((), RECEIVED_AT_ONCE)
        self._count = count

    def receive(self) -> Sequence[Delivery]:
        """Make the next deliveries; none when all were made."""
        with self._lock:
            start = self._next
            self._next = min(start + self._batch, self._count)
            numbers = range(start, self._next)
        if not numbers:
            threading.Event().wait(IDLE_SECONDS)
        return [Delivery(_message(), receipt=str(number)) for number in numbers]

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        """Count."""
        with self._lock:
            self.acked += len(deliveries)
        return [delivery.receipt for delivery in deliveries]


def _message() -> Message:
    account = random.randint(1, ACCOUNTS)
    return Message(f"{random.getrandbits(128):032x}", b'{"account": %d, "amount": 3, "currency": "EUR"}' % account)


def consume(_number: int, form: str, url: str, messages: int) -> tuple[list[float], float]:
    """Consume in this process; return its megabytes after each of ``SHARES``, and messages a second."""
    engine = create_engine(url, pool_size=THREADS, max_overflow=2)
    source = MadeSource(messages)
    how: dict[str, Any] = {"effect": EFFECT} if form == "effect" else {"batch_handler": handle_batch}
    worker = Worker(
        source,
        inbox=Inbox(SUBSCRIBER, schema=SCHEMA),
        engine=engine,
        threads=THREADS,
        batch_size=BATCH,
        prefetch=PREFETCH,
        **how,
    )
    worker.start()
    begun = time.monotonic()
    megabytes = [_resident_after(source, int(share * messages)) for share in SHARES]
    per_second = messages / (time.monotonic() - begun)
    if not worker.stop():
        raise RuntimeError("the worker did not drain")
    engine.dispose()
    return megabytes, per_second


def handle_batch(session: Session, messages: Sequence[Message]) -> None:
    """Apply a batch with one statement."""
    add_to_all(session, (message.json()["account"] for message in messages))


def _resident_after(source: MadeSource, wanted: int) -> float:
    """Wait until so many messages are settled; return the megabytes of this process that are in memory."""
    acked, until = -1, 0.0
    while source.acked < wanted:
        if source.acked != acked:
            acked, until = source.acked, time.monotonic() + STALLED_SECONDS
        if time.monotonic() > until:
            raise RuntimeError(f"the worker stands still at {acked} messages")
        threading.Event().wait(IDLE_SECONDS)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def tables(run: Run) -> list[Table]:
    """For each form: the memory after 1 %, and at the end."""
    return [
        Table(
            f"{form}: resident memory",
            [
                Row(f"{form}, after 1 %", partial(_measured, run, form), unit="MB"),
                Row(f"{form}, at the end", None, f"{form}, after 1 %", at_most=OF_FIRST, unit="MB", ours=True),
            ],
        )
        for form in ("effect", "batch_handler")
    ]


def _measured(run: Run, form: str) -> dict[str, Sample]:
    """Measure, and see that each message was applied once."""
    database, messages = run.database, run.options["messages"]
    database.reset()
    ((megabytes, per_second),) = in_processes(1, consume, form, run.url, messages)
    if database.recorded() != messages:
        raise WrongResult(f"{form}: {messages} messages left {database.recorded()} records")
    database.check(messages, form)
    between = {f"after {share:.0%}": value for share, value in zip(SHARES, megabytes, strict=True)}
    return {
        f"{form}, after 1 %": Sample(megabytes[0]),
        f"{form}, at the end": Sample(megabytes[-1], {"per_second": per_second, **between}),
    }


BENCHMARK = Benchmark(
    name="memory",
    title="Megabytes of a worker's process, from the first messages to the last",
    description=DESCRIPTION,
    options={
        "rounds": Option("how often each is measured", 1, 1),
        "messages": Option("that each consumes", 1_000_000, 1_000_000),
    },
    tables=tables,
)
