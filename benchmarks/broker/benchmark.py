"""The broker's benchmark: how much of a worker's speed is left when each call of its queue takes a while."""

import os
from functools import partial
from typing import NamedTuple

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from benchmarks.broker.server import slow_queue
from benchmarks.consumer.deliveries import PreparedSource, make_deliveries
from benchmarks.shared.database import SCHEMA, SUBSCRIBER
from benchmarks.shared.effects import EFFECT, add_to
from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run
from benchmarks.shared.work import WARM_UP_SECONDS, Rate, in_processes, ready, together, window
from txbox import Inbox, Message
from txbox_aws.sqs import SqsWorker
from txbox_workers.worker import Worker

OF_SEQUENTIAL, OF_MEMORY = 10.0, 0.8
"""Targets, as ratios."""

MESSAGES_PER_SECOND = 12_000
"""More than it reaches here; a faster machine ends its measurement when they are used up."""

AWS_SETTINGS = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}
PREFETCH = 1_000
EFFECT_BATCH = 100
THREADS = 2
PROCESSES = 2

DESCRIPTION = """\
A process with a worker whose queue speaks SQS's protocol, through boto3, and takes
--milliseconds for each answer:

  sequential   each thread receives, processes and deletes, one after the other: 1 thread
  ahead        the same worker with prefetch: receives and deletes run beside it
  memory       the same, with a source in memory: what Python and Postgres can do

"each" calls a handler for each message of a batch of ten; "effect" is an effect in SQL,
in batches of up to a hundred. With "2 processes", both receive from one queue, as those of
`txbox worker --processes 2` do. Records and balances are checked after each measurement.
"""


class Case(NamedTuple):
    """What is measured: "sequential", "ahead" or "memory"; "each" or "effect"; by how many processes."""

    how: str
    form: str
    processes: int = 1

    @property
    def key(self) -> str:
        """Its name in tables."""
        processes = f", {self.processes} processes" if self.processes > 1 else ""
        return f"{self.how} {self.form}{processes}"


def consume(_number: int, case: Case, url: str, seconds: float, queue: str) -> tuple[Rate, int]:
    """Consume in this process; return the rate, and how many messages were processed."""
    os.environ.update(AWS_SETTINGS, AWS_ENDPOINT_URL_SQS=queue.removesuffix("/queue/orders"))  # of this process alone
    threads = 1 if case.how == "sequential" else THREADS
    engine = create_engine(url, pool_size=threads, max_overflow=2)
    options = {
        "inbox": Inbox(SUBSCRIBER, schema=SCHEMA),
        "engine": engine,
        "threads": threads,
        "prefetch": 0 if case.how == "sequential" else PREFETCH,
        **({"handler": handle} if case.form == "each" else {"effect": EFFECT}),
    }
    if case.form == "effect" and case.how != "sequential":
        options["batch_size"] = EFFECT_BATCH
    worker: Worker
    if case.how == "memory":
        count = int((seconds + WARM_UP_SECONDS) * MESSAGES_PER_SECOND * 4)
        source = PreparedSource(make_deliveries(count, distance=count, as_json=True), 10)
        worker = Worker(source, **options)  # type: ignore[arg-type]
    else:
        worker = SqsWorker(queue, wait_seconds=1, **options)  # type: ignore[arg-type]
    ready()
    worker.start()
    rate = window(lambda: sum(worker.counts.values()), seconds)
    if not worker.stop():
        raise RuntimeError("the worker did not drain")
    engine.dispose()
    return rate, sum(count for outcome, count in worker.counts.items() if outcome == "processed")


def handle(session: Session, message: Message) -> None:
    """Apply one message."""
    add_to(session, message.json()["account"])


def tables(run: Run) -> list[Table]:
    """What receives and deletes cost a worker, for a handler and for an effect."""
    found = []
    for form in ("each", "effect"):
        sequential, memory, ahead = (Case(how, form) for how in ("sequential", "memory", "ahead"))
        two = ahead._replace(processes=PROCESSES)
        found += [
            Table(
                f"{form}: against a loop of receive, process and delete",
                [
                    Row(sequential.key, partial(_measured, run, sequential)),
                    Row(ahead.key, partial(_measured, run, ahead), sequential.key, OF_SEQUENTIAL, ours=True),
                ],
            ),
            Table(
                f"{form}: against one process",
                [Row(two.key, partial(_measured, run, two), ahead.key, ours=True)],
                plotted=False,
            ),
            Table(
                f"{form}: against a source in memory",
                [
                    Row(memory.key, partial(_measured, run, memory)),
                    Row(ahead.key, None, memory.key, OF_MEMORY, ours=True),
                ],
                plotted=False,
            ),
        ]
    return found


def _measured(run: Run, case: Case) -> Sample:
    """Measure, and see that what was applied is what the processed messages say."""
    database, seconds = run.database, run.options["seconds"]
    database.reset()
    messages = int((seconds + WARM_UP_SECONDS) * MESSAGES_PER_SECOND)
    with slow_queue(run.options["milliseconds"] / 1000, messages) as queue:
        results = in_processes(case.processes, consume, case, run.url, seconds, queue)
    rate, processed = together([rate for rate, _ in results]), sum(count for _, count in results)
    if database.recorded() != processed:
        raise WrongResult(f"{case.key}: {processed} messages left {database.recorded()} records")
    database.check(processed, case.key)
    return Sample(rate.per_second, {"cpu_us": rate.cpu_us})


BENCHMARK = Benchmark(
    name="broker",
    title="Messages consumed a second from a queue that takes its time",
    description=DESCRIPTION,
    options={
        "rounds": Option("how often each is measured", 2, 3),
        "seconds": Option("of each measurement", 3.0, 8.0),
        "milliseconds": Option("that each answer of the queue takes", 15.0, 15.0),
    },
    tables=tables,
    settings={},
)
