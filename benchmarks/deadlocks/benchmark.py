"""What a worker gets done whose handlers run into deadlocks, against every setting that stays as it is.

A handler upserts 16 rows, and 3 hot ones that all messages share, in the order of the message.
"""

import json
import random
import uuid
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from benchmarks.shared.database import SCHEMA
from benchmarks.shared.measurements import Row, Sample, Table
from benchmarks.shared.program import Benchmark, Option, Run
from benchmarks.shared.work import Rate, in_processes, ready, together, window
from txbox import Inbox, Message, Outcome
from txbox.instrumentation import Event, Retried
from txbox_workers.memory_source import MemorySource
from txbox_workers.processing import deadlocks
from txbox_workers.processing.transaction_modes import ModeSelector
from txbox_workers.worker import Worker

LEAST_OF_BEST = 0.8
PROCESSES, ROWS, HOT_ROWS, KEYS, HOT_KEYS = 2, 2_000, 10, 16, 3
MESSAGES_PER_SECOND = 2_000
"""More than there is time for."""

ADAPTS, BEST = "adapts, 4 threads", "best of the fixed settings"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    ADAPTS: {"threads": 4},
    "batch, 4 threads": {"threads": 4},
    "message, 4 threads": {"threads": 4, "transactions": "message"},
    "batch, 1 thread": {"threads": 1},
    "message, 1 thread": {"threads": 1, "transactions": "message"},
}
UPSERT = text(f"INSERT INTO {SCHEMA}.stock VALUES (:key, 1) ON CONFLICT (key) DO UPDATE SET sold = stock.sold + 1")

DESCRIPTION = """\
Run workers whose handlers run into deadlocks: two processes with four threads, or one
thread, each; a transaction for a batch, or for each message. The workers that adapt, with
the defaults and four threads, have to reach 0.8 of the best of the others, in the same
round.
"""


class Fixed(ModeSelector):
    """Keeps the first mode."""

    def _choose(self) -> None:
        """Stay as it is."""


def work(number: int, url: str, setting: str, seconds: float) -> tuple[Rate, int]:
    """Work in this process; return the rate, and how many deadlocks there were."""
    if setting != ADAPTS:
        deadlocks.ModeSelector = Fixed  # type: ignore[misc]
    engine, counts = create_engine(url, pool_size=8), Counter[str]()

    def count(event: Event) -> None:
        if isinstance(event, Retried):
            counts[event.sqlstate] += 1

    source = MemorySource(_messages(random.Random(number), round(seconds * MESSAGES_PER_SECOND)))
    inbox = Inbox("benchmark", schema=SCHEMA)
    worker = Worker(
        source, inbox=inbox, engine=engine, handler=_handle, hooks=[count], max_attempts=None, **SETTINGS[setting]
    )
    ready()
    worker.start()
    rate = window(lambda: worker.counts.get(Outcome.PROCESSED, 0), seconds)
    worker.stop(30)
    return rate, counts["40P01"]


def _handle(session: Session, message: Message) -> None:
    for key in message.json():
        session.execute(UPSERT, {"key": key})


def _messages(chance: random.Random, count: int) -> list[Message]:
    run = uuid.uuid4().hex

    def keys() -> list[str]:
        usual = [f"row {chance.randrange(ROWS)}" for _ in range(KEYS)]
        return usual + [f"hot {chance.randrange(HOT_ROWS)}" for _ in range(HOT_KEYS)]

    return [Message(f"{run}-{number}", json.dumps(keys()).encode()) for number in range(count)]


def tables(run: Run) -> list[Table]:
    """Each setting, and the best of those that stay as they are."""
    rates: dict[str, float] = {}

    def measured(setting: str) -> Sample:
        run.database.reset()
        run.database.execute(
            f"DROP TABLE IF EXISTS {SCHEMA}.stock; "
            f"CREATE TABLE {SCHEMA}.stock (key text PRIMARY KEY, sold bigint NOT NULL)"
        )
        results = in_processes(PROCESSES, work, run.url, setting, run.options["seconds"])
        rates[setting] = together([rate for rate, _ in results]).per_second
        return Sample(rates[setting], {"deadlocks": sum(found for _, found in results)})

    def best_of_round() -> Sample:
        for row in fixed:
            if row.key not in rates:  # --only has left it out
                measured(row.key)
        best = max(rates[row.key] for row in fixed)
        rates.clear()
        return Sample(best)

    fixed = [Row(setting, partial(measured, setting), BEST) for setting in SETTINGS if setting != ADAPTS]
    best = Row(BEST, best_of_round)
    adapts = Row(ADAPTS, partial(measured, ADAPTS), BEST, LEAST_OF_BEST, ours=True)
    return [Table("handlers that run into deadlocks", [*fixed, best, adapts])]


BENCHMARK = Benchmark(
    name="deadlocks",
    title="Messages a second where handlers run into deadlocks",
    description=DESCRIPTION,
    options={
        "rounds": Option("how often each is measured", 2, 3),
        "seconds": Option("of each measurement", 20.0, 60.0),
    },
    tables=tables,
    settings={"max_connections": "50"},
)
