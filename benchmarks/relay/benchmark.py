"""The relay's benchmark: what publishing costs, how fast a relay is, how soon a message arrives."""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

from benchmarks.relay.outbox import CLAIM_NEWEST, CLAIM_PLAIN, BenchmarkOutbox, transaction_script
from benchmarks.relay.producers import feed, produce
from benchmarks.relay.relays import SLOW_SECONDS, SLOW_SENDERS, Relays
from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run

RATE = 1_000
"""Messages a second at which the latency is measured."""

IDLE_AFTER_SECONDS = 15.0
"""So long after its start a relay with nothing to do is idle, and the server has counted all of its start."""

ENDS = 3
"""So many windows at either end are compared, by their medians: a checkpoint may slow a single one down."""

SCRIPTS = {
    "pgbench update": {"publish": False, "order": False},
    "pgbench update, publish": {"publish": True, "order": False},
    "pgbench update, order": {"publish": False, "order": True},
    "pgbench update, order, publish": {"publish": True, "order": True},
}
SILENT, NOTIFYING = "16 producers, not notifying", "16 producers, notifying"
ALONE, BESIDE = "producers at 1,000/s, alone", "producers at 1,000/s, relay"
WAITING, AWAITED, THREADS = "what waiting allows", "async publisher", f"{SLOW_SENDERS} threads"
DESTINATIONS = 300
"""That are slow."""

IDLE_ASYNC = "idle relay, async publisher, transactions"
IDLE, HEALTH, SNAPSHOT = "idle relay, transactions", "slowdown", "slowdown, old snapshot"

DESCRIPTION = """\
Measure the outbox and its relay:

  pgbench     a business transaction with and without our INSERT, with the row of an
              order and without: 16 connections, the server's cost
  producers   16 in Python that publish, as fast as they can, with our notification and
              without, and at 1,000 messages a second
  drain       a backlog through relays that send nowhere, against plain deletes
  latency     from the return of a commit to the arrival at the publisher, at 1,000/s,
              against a loop of plain deletes
  slow        300 destinations that answer after 200 ms, one message at a time of each,
              by an async publisher and by threads, against what waiting allows
  idle        transactions of a relay that has nothing to do
  slowdown    of windows of messages published and relayed at once, from first to last,
              with and without an old snapshot that is held

After each measurement the accounts must add up and the outbox must be empty.
"""


class Measuring:
    """How each measurement is made, and that its accounts add up."""

    def __init__(self, run: Run) -> None:
        """Prepare; nothing is started."""
        self.run = run
        self.sizes = run.options

    @cached_property
    def outbox(self) -> BenchmarkOutbox:
        """The tables."""
        return BenchmarkOutbox(self.run.database)

    def check(self, key: str, transactions: int, waiting: int) -> None:
        """See that what has committed is there, no more and no less."""
        self.run.database.check(transactions, key)
        self.outbox.must_hold(waiting, key)

    def by_pgbench(self, key: str) -> Sample:
        """Producers that cost nothing."""
        self.outbox.reset()
        script, variables = transaction_script(**SCRIPTS[key])
        result = self.run.pgbench(script, 16, variables)
        self.check(key, result.transactions, result.transactions if SCRIPTS[key]["publish"] else 0)
        return Sample(result.tps)

    def by_python(self, key: str) -> Sample:
        """Producers in Python as fast as they can, without a relay."""
        self.outbox.reset()
        with self.outbox.listener() if key == NOTIFYING else nullcontext():
            produced, _ = produce(self.run.url, self.sizes["seconds"], notify=key == NOTIFYING)
        self.check(key, produced.done, produced.done)
        return Sample(produced.per_second, {"cpu_us": produced.cpu_us})

    def drained(self, claim: str | None, processes: int) -> Sample:
        """A backlog through relays, or through plain deletes."""
        count = self.sizes["backlog"]
        self.outbox.fill(count, plain=claim is not None)
        with Relays(self.run.url, processes, claim=claim) as running:
            began = running.start()
            seconds = running.wait_for(count) - began
            cpu_us = running.cpu_seconds() / count * 1e6
            running.stop()
        self.outbox.must_hold(0, "drained", plain=claim is not None)
        return Sample(count / seconds, {"cpu_us": cpu_us})

    def slow(self, kind: str, each: int) -> Sample:
        """Many destinations that take their time, with so many messages for each; without the start, and the end."""
        count = DESTINATIONS * each
        self.outbox.fill_destinations(DESTINATIONS, each)
        with Relays(self.run.url, slow=kind) as running:
            running.start()
            began = running.wait_for(count // 10)
            seconds = running.wait_for(count * 9 // 10) - began
            running.wait_for(count)
            cpu_us = running.cpu_seconds() / count * 1e6
            running.stop()
        self.outbox.must_hold(0, "slow")
        return Sample(count * 8 / 10 / seconds, {"cpu_us": cpu_us})

    def latency(self, name: str, claim: str | None) -> Mapping[str, Sample]:
        """Producers at a given rate, and a relay that remembers when what arrived."""
        self.outbox.reset()
        with Relays(self.run.url, claim=claim, timed=True) as running:
            running.start()
            produced, commits = produce(self.run.url, self.sizes["seconds"], rate=RATE)
            running.wait_for(produced.done)
            arrivals = running.stop()
        self.check(name, produced.done, 0)
        if not len(commits) == len(arrivals) == produced.done:
            raise WrongResult(f"{name}: {produced.done} messages, {len(arrivals)} arrivals")
        # A message may arrive before its producer's commit has returned.
        waits = sorted(
            max(arrivals[str(number)] - moment, 0.0) * 1000
            for number, moment in commits.items()
            if moment >= produced.began
        )
        p99, median = Sample(waits[int(len(waits) * 0.99)]), Sample(statistics.median(waits))
        samples = {f"{name}, p99": p99, f"{name}, median": median}
        return samples if claim else {**samples, BESIDE: Sample(produced.per_second)}

    def fixed_rate_alone(self) -> Sample:
        """The same producers, alone."""
        self.outbox.reset()
        return Sample(produce(self.run.url, self.sizes["seconds"], notify=False, rate=RATE)[0].per_second)

    def idle(self, slow: str | None) -> Sample:
        """A relay with nothing to do."""
        self.outbox.reset()
        with Relays(self.run.url, slow=slow) as running:
            running.start()
            time.sleep(IDLE_AFTER_SECONDS)
            before, began, cpu = self.outbox.transactions(), time.perf_counter(), running.cpu_seconds()
            time.sleep(self.sizes["idle_seconds"])
            seconds = time.perf_counter() - began
            found, cpu = (self.outbox.transactions() - before) / seconds, running.cpu_seconds() - cpu
            running.stop()
        return Sample(found, {"cpu_percent": 100 * cpu / seconds})

    def health(self, key: str, count: int) -> Sample:
        """Publish and relay at once, window after window: how much slower the last ones are than the first."""
        self.outbox.reset()
        window = self.sizes["window"]
        with self.outbox.old_snapshot() if key == SNAPSHOT else nullcontext(), Relays(self.run.url) as running:
            last = running.start()
            feeder = multiprocessing.get_context("spawn").Process(target=feed, args=(self.run.url, count, running.sent))
            feeder.start()
            try:
                rates = []
                for end in range(window, count + 1, window):
                    moment = running.wait_for(end)
                    rates.append(window / (moment - last))
                    last = moment
                running.wait_for(count)
                feeder.join()
            finally:
                feeder.terminate()
            running.stop()
        self.outbox.must_hold(0, key)
        # In the first window, processes start and the table is made as large as the backlog.
        steady = rates[1:] if len(rates) > ENDS else rates
        slowdown = statistics.median(steady[:ENDS]) / statistics.median(steady[-ENDS:])
        return Sample(slowdown, {f"window {number}": rate for number, rate in enumerate(rates, 1)})


def tables(run: Run) -> list[Table]:
    """One table for each subject."""
    this = Measuring(run)

    def row(key: str, measured: Callable[[str], Any], *to: Any) -> Row:
        return Row(key, partial(measured, key), *to, ours=bool(to))

    def drain(count: int) -> list[Row]:
        limit = Row(f"plain deletes x{count}", partial(this.drained, CLAIM_PLAIN, count))
        return [limit, Row(f"relay x{count}", partial(this.drained, None, count), limit.key, ours=True)]

    update, publish, order, both = SCRIPTS
    script = [row(update, this.by_pgbench), row(publish, this.by_pgbench, update, 0.85)]
    script += [row(order, this.by_pgbench), row(both, this.by_pgbench, order, 0.85)]
    latency = [
        Row("plain deletes, p99", partial(this.latency, "plain deletes", CLAIM_NEWEST), unit="ms"),
        Row("plain deletes, median", unit="ms"),
        Row("relay, p99", partial(this.latency, "relay", None), at_most=10, unit="ms", ours=True),
        Row("relay, median", unit="ms", ours=True),
    ]
    slow = [
        Row(WAITING, lambda: Sample(DESTINATIONS / SLOW_SECONDS)),
        Row(AWAITED, partial(this.slow, "async", run.options["slow_messages"]), WAITING, 0.9, ours=True),
        Row(THREADS, partial(this.slow, "threads", 4)),
    ]
    health = [Row(IDLE, partial(this.idle, None), at_most=2), Row(IDLE_ASYNC, partial(this.idle, "async"), at_most=2)]
    for key, size in ((HEALTH, "messages"), (SNAPSHOT, "snapshot_messages")):
        health.append(Row(key, partial(this.health, key, run.options[size]), at_most=1.2, unit="x"))
    capacity = [Row(f"relay x{count}", None, NOTIFYING, 10) for count in (1, 2)]
    return [
        Table("pgbench, 16 connections", script),
        Table("producers in Python, 16", [row(SILENT, this.by_python), row(NOTIFYING, this.by_python, SILENT, 0.9)]),
        Table("a backlog that is sent nowhere", [*drain(1), *drain(2)]),
        Table("against what producers write", capacity, plotted=False),
        Table("from commit to receipt at 1,000/s", latency),
        Table(
            "the producers of those",
            [Row(ALONE, this.fixed_rate_alone), Row(BESIDE, None, ALONE, 0.9)],
            plotted=False,
        ),
        Table("300 slow destinations", slow, plotted=False),
        Table("a relay's health", health, plotted=False),
    ]


BENCHMARK = Benchmark(
    name="relay",
    title="The outbox and its relay",
    description=DESCRIPTION,
    options={
        "rounds": Option("how often each is measured", 1, 1),
        "seconds": Option("of each measurement of producers", 2.0, 5.0),
        "backlog": Option("messages of a backlog that is drained", 200_000, 500_000),
        "slow_messages": Option("messages for each of 300 slow destinations", 30, 100),
        "idle_seconds": Option("of the look at an idle relay", 10.0, 30.0),
        "messages": Option("messages published and relayed at once", 300_000, 5_000_000),
        "snapshot_messages": Option("the same while an old snapshot is held", 300_000, 2_000_000),
        "window": Option("messages of a window of those", 20_000, 100_000),
    },
    tables=tables,
)
