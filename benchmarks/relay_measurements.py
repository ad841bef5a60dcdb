"""The measurements of the relay's benchmark: how each is made, and that its accounts add up."""

import multiprocessing
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

from business import SCHEMA, Business, WrongResult
from pgbench import run_pgbench
from relay_place import BODY, DESTINATION, OutboxPlace
from relay_processes import RelayOrder, Relays, drain_raw, relays
from relay_producers import Produced, Production, feed, produce
from relay_queue import LocalQueue, send_bare
from relay_scripts import business_script
from rounds import Measurement, Sample
from sqlalchemy import create_engine

from txbox.outbox import Outbox, Outgoing

__all__ = ["Bench", "Sizes"]

PROCESSES = 2
"""Of producers in Python, which need more than one processor to be worth the name."""

PACE = 1_000
"""Messages a second at which the latency is measured."""

SENDERS = 4
"""Threads of a relay, and of the bare loop beside it: the default."""

AHEAD = 50_000
"""How far the producers of endless messages may be ahead of the relays."""

PATIENCE_SECONDS = 600.0
IDLE_AFTER_SECONDS = 15.0
"""So long after its start a relay with nothing to do has come to rest, and the server has counted all of its start."""

ENDS = 3
"""So many windows at either end are compared, by their medians: one is at the mercy of a checkpoint."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured; ``relay.py --help`` says what each is."""

    seconds: float = 5.0
    backlog: int = 300_000
    queue_messages: int = 5_000
    idle_seconds: float = 30.0
    wakes: int = 20
    messages: int = 5_000_000
    snapshot_messages: int = 2_000_000
    window: int = 100_000
    feed_batch: int = 500
    memory_messages: int = 1_000_000


@dataclass(frozen=True)
class Bench:
    """Where to measure, and how much."""

    url: str
    pgbench: str
    business: Business
    place: OutboxPlace
    sizes: Sizes
    stack: ExitStack

    # --- publish -----------------------------------------------------------------------------------------------------

    def by_pgbench(
        self,
        key: str,
        connections: int,
        *,
        publish: bool,
        order: bool = False,
        plain: bool = False,
        notify: bool = False,
    ) -> Measurement:
        """Measure a script."""

        def run() -> Sample:
            self.place.reset()
            script = business_script(publish=publish, order=order, plain=plain, notify=notify)
            with self.place.listener() if notify else nullcontext():
                result = run_pgbench(
                    self.pgbench,
                    self.url,
                    script.text,
                    connections=connections,
                    seconds=self.sizes.seconds,
                    variables=script.variables,
                )
            table = "raw_outbox" if plain else "outbox_message"
            self.check(key, result.transactions, waiting=result.transactions if publish else 0, table=table)
            return Sample(result.tps)

        return Measurement(key, "/s", run)

    def by_python(self, key: str, *, publish: bool, ring: bool = True) -> Measurement:
        """Measure producers without a relay."""

        def run() -> Sample:
            self.place.reset()
            produced = produce(replace(self.production, publish=publish, ring=ring))
            transactions = sum(one.transactions for one in produced)
            self.check(key, transactions, waiting=transactions if publish else 0)
            return _sample(produced)

        return Measurement(key, "/s", run)

    @property
    def production(self) -> Production:
        """Sixteen producers as fast as they can."""
        return Production(self.url, True, 16, PROCESSES, self.sizes.seconds)

    def check(self, key: str, transactions: int, *, waiting: int, table: str = "outbox_message") -> None:
        """See that what has committed is there, no more and no less."""
        self.business.check(transactions, key)
        if (found := self.place.waiting(table)) != waiting:
            raise WrongResult(f"{key}: {found} messages are in {table}, not {waiting}")

    # --- drain -------------------------------------------------------------------------------------------------------

    def drained(self, key: str, processes: int, *, keyed: bool = False) -> Measurement:
        """Measure relays that send nowhere."""

        def run() -> Sample:
            count = self.sizes.backlog
            self.place.fill(count, keyed=keyed)
            with relays(RelayOrder(self.url), processes) as running:
                begun = self.start(running)
                seconds = running.wait_for(count, PATIENCE_SECONDS) - begun
                cpu_us = running.cpu_seconds() / count * 1e6
                running.stop()
            self.place.must_be_empty(key)
            return Sample(count / seconds, {"cpu_us": cpu_us})

        return Measurement(key, "/s", run)

    def drained_raw(self, key: str, processes: int) -> Measurement:
        """Measure plain deletes."""

        def run() -> Sample:
            self.place.fill_raw(self.sizes.backlog)
            rate = drain_raw(self.url, processes)
            self.place.must_be_empty(key, "raw_outbox")
            return Sample(rate)

        return Measurement(key, "/s", run)

    def start(self, running: Relays) -> float:
        """Start relays; return when, by ``time.perf_counter``."""
        running.start()
        return time.perf_counter()

    # --- the local SQS -----------------------------------------------------------------------------------------------

    @cached_property
    def queue(self) -> LocalQueue:
        """A server that runs to the end of the benchmark."""
        from txbox_local import LocalAws

        return LocalQueue(self.stack.enter_context(LocalAws()))

    def sent_bare(self, key: str) -> Measurement:
        """Measure boto3 alone."""

        def run() -> Sample:
            count = self.sizes.queue_messages
            with self.queue.fresh() as queue_url:
                rate = send_bare(self.queue.environment, queue_url, count, SENDERS)
                self._must_hold(key, count)
            return Sample(rate)

        return Measurement(key, "/s", run)

    def sent_by_relay(self, key: str) -> Measurement:
        """Measure the relay with the publisher of SQS."""

        def run() -> Sample:
            count = self.sizes.queue_messages
            self.place.reset()
            with self.queue.fresh() as queue_url:
                self._publish([Outgoing(queue_url, BODY)] * count)
                order = RelayOrder(self.url, "aws", options={"senders": SENDERS}, environment=self.queue.environment)
                with relays(order) as running:
                    begun = self.start(running)
                    seconds = running.wait_for(count, PATIENCE_SECONDS) - begun
                    running.stop()
                self._must_hold(key, count)
            self.place.must_be_empty(key)
            return Sample(count / seconds)

        return Measurement(key, "/s", run)

    def _must_hold(self, key: str, count: int) -> None:
        if (found := self.queue.waiting()) != count:
            raise WrongResult(f"{key}: the queue holds {found} messages, not {count}")

    def _publish(self, messages: list[Outgoing]) -> None:
        engine = create_engine(self.url)
        with engine.begin() as connection:
            Outbox(schema=SCHEMA, notify=False).publish_many(connection, messages)
        engine.dispose()

    # --- latency -----------------------------------------------------------------------------------------------------

    def paced(self, key: str, publisher: str) -> Mapping[str, float]:
        """Producers at a given rate, and a relay that remembers when what arrived."""
        self.place.reset()
        with relays(RelayOrder(self.url, publisher)) as running:
            running.start()
            produced = produce(replace(self.production, rate=PACE, timed=True))
            transactions = sum(one.transactions for one in produced)
            running.wait_for(transactions, PATIENCE_SECONDS)
            arrivals = running.stop()
        self.check(key, transactions, waiting=0)
        commits = {number: moment for one in produced for number, moment in one.commits.items()}
        if len(commits) != transactions or len(arrivals) != transactions:
            raise WrongResult(f"{key}: {transactions} messages, {len(commits)} commits, {len(arrivals)} arrivals")
        begun = max(one.begun for one in produced)
        # A message may arrive before its producer is told of the commit.
        waits = sorted(
            max(arrivals[str(number)] - moment, 0.0) * 1000 for number, moment in commits.items() if moment >= begun
        )
        return {
            "median": statistics.median(waits),
            "p99": waits[int(len(waits) * 0.99)],
            "most": waits[-1],
            "producers": sum(one.rate for one in produced),
        }

    def paced_alone(self, key: str) -> Measurement:
        """The same producers, alone."""

        def run() -> Sample:
            self.place.reset()
            return _sample(produce(replace(self.production, rate=PACE, timed=True, ring=False)))

        return Measurement(key, "/s", run)

    def woken(self) -> Mapping[str, float]:
        """Messages that find the relay idle, one after the other."""
        self.place.reset()
        engine, outbox, commits = create_engine(self.url), Outbox(schema=SCHEMA), {}
        with relays(RelayOrder(self.url, "timed")) as running:
            running.start()
            for number in range(self.sizes.wakes):
                # Long enough for the relay to fall asleep, and not in step with its looks.
                time.sleep(1.5 + 0.6 * number / self.sizes.wakes)
                with engine.connect() as connection:
                    outbox.publish(connection, DESTINATION, str(number))
                    connection.commit()
                    commits[number] = time.monotonic()
            running.wait_for(self.sizes.wakes, PATIENCE_SECONDS)
            arrivals = running.stop()
        engine.dispose()
        waits = [(arrivals[str(number)] - moment) * 1000 for number, moment in commits.items()]
        return {"median": statistics.median(waits), "most": max(waits)}

    def hurried(self, key: str, *, ring: bool, relay: str | None) -> Measurement:
        """Measure producers at full speed, beside a relay.

        Args:
            key: names it.
            ring: whether they ring the bell.
            relay: None: there is none; "idle": it hears the bell and has nothing to send; "busy": it sends.
        """

        def run() -> Sample:
            self.place.reset()
            production = replace(self.production, ring=ring)
            if relay == "busy":
                with relays(RelayOrder(self.url)) as running:
                    running.start()
                    produced = produce(production)
                    running.wait_for(sum(one.transactions for one in produced), PATIENCE_SECONDS)
                    running.stop()
                self.place.must_be_empty(key)
            else:
                with self.place.listener() if relay == "idle" else nullcontext():
                    produced = produce(production)
            return _sample(produced)

        return Measurement(key, "/s", run)

    # --- idle --------------------------------------------------------------------------------------------------------

    def idle(self) -> Mapping[str, float]:
        """A relay with nothing to do."""
        self.place.reset()
        with relays(RelayOrder(self.url)) as running:
            running.start()
            time.sleep(IDLE_AFTER_SECONDS)
            transactions, cpu, begun = self.place.transactions(), running.cpu_seconds(), time.perf_counter()
            time.sleep(self.sizes.idle_seconds)
            seconds = time.perf_counter() - begun
            found = {
                "transactions": (self.place.transactions() - transactions) / seconds,
                "processor": (running.cpu_seconds() - cpu) / seconds * 1000,
            }
            running.stop()
        return found

    # --- health and memory -------------------------------------------------------------------------------------------

    def endless(self, key: str, count: int, *, snapshot: bool) -> Mapping[str, float]:
        """Publish and relay at once, window after window."""
        self.place.reset()
        with (
            self.place.old_snapshot() if snapshot else nullcontext(),
            relays(RelayOrder(self.url)) as running,
        ):
            begun = self.start(running)
            feeder = multiprocessing.get_context("spawn").Process(
                target=feed, args=(self.url, count, self.sizes.feed_batch, AHEAD, running.sent)
            )
            feeder.start()
            try:
                rates, last = [], begun
                for end in range(self.sizes.window, count + 1, self.sizes.window):
                    moment = running.wait_for(end, PATIENCE_SECONDS)
                    rates.append(self.sizes.window / (moment - last))
                    last = moment
                running.wait_for(count, PATIENCE_SECONDS)
                feeder.join()
            finally:
                feeder.terminate()
            running.stop()
            table, indexes = self.place.sizes()
        self.place.must_be_empty(key)
        # In the first one, processes start and the table is made as large as the backlog.
        steady = rates[1:] if len(rates) > ENDS else rates
        first, final = statistics.median(steady[:ENDS]), statistics.median(steady[-ENDS:])
        print(f"{key}: " + " ".join(f"{rate:,.0f}" for rate in rates))
        return {
            "first windows": first,
            "last windows": final,
            "slowdown": first / final,
            "table": table,
            "indexes": indexes,
            **{f"window {number}": rate for number, rate in enumerate(rates, 1)},
        }

    def remembered(self) -> Mapping[str, float]:
        """One relay's memory while a backlog goes through it."""
        count = self.sizes.memory_messages
        self.place.fill(count)
        with relays(RelayOrder(self.url)) as running:
            running.start()
            memory = []
            for step in range(1, 101):
                running.wait_for(count * step // 100, PATIENCE_SECONDS)
                memory.append(running.memory_mib())
            running.stop()
        self.place.must_be_empty("memory")
        return {"at first": memory[0], "peak": max(memory), "at the end": memory[-1]}


def _sample(produced: list[Produced]) -> Sample:
    rate = sum(one.rate for one in produced)
    return Sample(rate, {"cpu_us": sum(one.cpu_us * one.rate for one in produced) / rate})
