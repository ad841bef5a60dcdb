"""What a worker gets done whose handlers run into deadlocks, against every setting that stays as it is.

The load: a handler upserts 16 rows, and 3 hot ones that all messages share, in the order of the message. Two processes
with four threads, or one thread, each; batches, or a transaction for each message. The workers that adapt, with the
defaults and four threads, have to reach 0.8 of the best of the others, in the same round.
"""

import argparse
import collections
import json
import multiprocessing
import random
import statistics
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from running import embedded, positive
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from txbox import Inbox, Message, Outcome
from txbox.instrumentation import Event, Retried
from txbox.schema import tables
from txbox_workers.memory import MemorySource
from txbox_workers.processing import deadlocks
from txbox_workers.processing.deadlocks import Contention, Report, Way
from txbox_workers.worker import Worker

LIMIT = 0.8
PROCESSES, ROWS, HOT_ROWS, KEYS, HOT_KEYS = 2, 2_000, 10, 16, 3
ADAPTS = "adapts, 4 threads"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    ADAPTS: {"threads": 4},
    "batch, 4 threads": {"threads": 4},
    "message, 4 threads": {"threads": 4, "transactions": "message"},
    "batch, 1 thread": {"threads": 1},
    "message, 1 thread": {"threads": 1, "transactions": "message"},
}
UPSERT = text("INSERT INTO stock VALUES (:key, 1) ON CONFLICT (key) DO UPDATE SET sold = stock.sold + 1")


class Fixed(Contention):
    """Learns nothing."""

    def conflicted(self, way: Way, code: str, place: str, seconds: float) -> Report | None:  # noqa: ARG002
        """Stay as it is."""
        return None


def main() -> None:
    """Measure, print, and exit with 1 if the limit is not reached."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=positive(float), default=60.0, help="of each measurement (default: 60)")
    parser.add_argument("--rounds", type=positive(int), default=3, help="how often each is measured (default: 3)")
    options = parser.parse_args()
    shares = []
    with ExitStack() as stack:
        url = embedded(stack, max_connections="50")
        engine = create_engine(url)
        with engine.begin() as connection:
            tables().processed_message.metadata.create_all(connection)
            connection.exec_driver_sql("CREATE TABLE stock (key text PRIMARY KEY, sold bigint NOT NULL)")
        engine.dispose()
        for number in range(1, options.rounds + 1):
            rates = {}
            for name, settings in SETTINGS.items():
                rates[name], conflicts = _measure(url, name, settings, options.seconds)
                print(f"round {number}: {name}: {rates[name]:,.1f} messages/s, {conflicts} deadlocks", flush=True)
            best = max(rate for name, rate in rates.items() if name != ADAPTS)
            shares.append(rates[ADAPTS] / best)
            print(f"round {number}: {shares[-1]:.2f} of the best that stays as it is", flush=True)
    share = statistics.median(shares)
    print(f"median: {share:.2f}, wanted {LIMIT}")
    sys.exit(0 if share >= LIMIT else 1)


def _measure(url: str, name: str, settings: Mapping[str, Any], seconds: float) -> tuple[float, int]:
    """Return messages per second of all processes, and how many deadlocks they had."""
    spawn = multiprocessing.get_context("spawn")
    begin, results = spawn.Barrier(PROCESSES), spawn.Queue()
    arguments = (url, name != ADAPTS, dict(settings), seconds, begin, results)
    processes = [spawn.Process(target=_work, args=(number, *arguments)) for number in range(PROCESSES)]
    for process in processes:
        process.start()
    counts = [results.get(timeout=seconds + 120) for _ in processes]
    for process in processes:
        process.join(60)
    return sum(done for done, _ in counts) / seconds, sum(conflicts for _, conflicts in counts)


def _work(number: int, url: str, fixed: bool, settings: dict[str, Any], seconds: float, begin: Any, out: Any) -> None:
    """One process: work for so long on more messages than there is time for."""
    if fixed:
        deadlocks.Contention = Fixed  # type: ignore[misc]
    engine = create_engine(url, pool_size=8)
    conflicts: collections.Counter[str] = collections.Counter()

    def hear(event: Event) -> None:
        if isinstance(event, Retried):
            conflicts[event.sqlstate] += 1

    source = MemorySource(_messages(random.Random(number), round(seconds * 2_000)))
    worker = Worker(
        source, inbox=Inbox("benchmark"), engine=engine, handler=_handle, hooks=[hear], max_attempts=None, **settings
    )
    begin.wait(60)
    worker.start()
    time.sleep(seconds)
    out.put((worker.counts.get(Outcome.PROCESSED, 0), conflicts["40P01"]))
    worker.stop(30)


def _handle(session: Session, message: Message) -> None:
    for key in message.json():
        session.execute(UPSERT, {"key": key})


def _messages(chance: random.Random, count: int) -> list[Message]:
    run = uuid.uuid4().hex

    def keys() -> list[str]:
        usual = [f"row {chance.randrange(ROWS)}" for _ in range(KEYS)]
        return usual + [f"hot {chance.randrange(HOT_ROWS)}" for _ in range(HOT_KEYS)]

    return [Message(f"{run}-{number}", json.dumps(keys()).encode()) for number in range(count)]


if __name__ == "__main__":
    main()
