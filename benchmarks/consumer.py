"""The consumer's benchmark: what exactly-once costs, and how far the Python roads stay behind pgbench.

One business update, an amount onto one of 10,000 accounts, is measured with and without the inbox. The ratios, taken in
alternation in one run, mean something; the absolute figures are those of one machine on one day.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from business import Business, WrongResult
from consumer_roads import Form, Job, Road, run_job
from consumer_scripts import Script, batch_script, one_statement_script, single_script
from pgbench import PgbenchFailed, find_pgbench, run_pgbench
from record_cost import RECORD_WAYS, measure_record
from report import Target, print_figures, print_targets, write_json
from rich.console import Console
from rounds import Measurement, Sample
from running import add_options, chosen, embedded, kept, measured, positive

HANDLER_BATCH = 10
"""Deliveries at once where the handler is called for each: what SQS gives."""

MOST = 3_000
"""A batch's ids are one argument of pgbench's, which the system limits to 128 KiB."""

RECORDS = 10_000
"""Messages recorded to measure what one costs."""

RECORD_CPU_US = 60
WORKER_ONE_CONNECTION = 0.5
WORKER_SIXTEEN_CONNECTIONS = 0.9
SET_OF_TEN = 0.6
SET_OF_HUNDRED = 0.95
WORKER_OVERHEAD = 1.15
INBOX_COST = 1.15

DESCRIPTION = """\
Measure the same business update, with and without the inbox, by several roads:

  pgbench   the limit: the server with a client that costs nothing. For a batch it sends the same arrays and statements
            as a client must; "in one statement" it makes the messages up on the server and sends nothing
  psycopg   an ordinary cursor and commit
  bare      a loop with a session, the record written by hand, the same handler as below
  worker    our worker, its source in memory

in three forms:

  message   a transaction for each message
  each      a transaction for a batch of 10, the handler called for each message
  set       a transaction for a batch, one call and one statement for all of it

A measurement's key is "road form batch, connections": "worker set 100, 1c"; "x2" means that two processes share the
connections. "no inbox" is the business update alone. 5 % of the messages are duplicates. After each measurement the
balances must add up to what the distinct messages say, to the last one; otherwise nothing is reported.

"client us" is the client's processor time for a message. "WAL sync us" is what a sync of the write-ahead log took while
that row was measured: on a busy disk, compare the processor times, or ask for more --rounds.
"""

EPILOG = """\
examples:
  make bench                                          everything, about half an hour
  make bench BENCH='--rounds 1 --seconds 1'           a first look
  make bench BENCH='--connections 1 --only "each|record"'
  make bench BENCH='--ids v7'                         ids that begin with the time
  make bench BENCH='--list'                           the keys of all measurements

The database is a PostgreSQL of its own on this machine, started for the run and removed after it, with fsync on.
With --url the tables live in the schema txbox_benchmark there, which is dropped and made anew.
"""


@dataclass(frozen=True)
class Bench:
    """The options, and where to measure."""

    url: str
    pgbench: str
    business: Business
    seconds: float
    ids: str

    def by_pgbench(self, key: str, script: Script, *, batch: int, connections: int, inbox: bool) -> Measurement:
        """Measure a script."""
        variables = {"n": 0, **script.variables}

        def run() -> Sample:
            self.business.reset(script.seeds)
            syncs = self.business.wal_syncs()
            result = run_pgbench(
                self.pgbench, self.url, script.text, connections=connections, seconds=self.seconds, variables=variables
            )
            messages = result.transactions * batch
            applied = self.business.recorded() if inbox else messages
            if not 0.9 * messages <= applied <= messages:
                raise WrongResult(f"{key}: {messages} messages left {applied} records")
            self.business.check(applied, key)
            return Sample(result.tps * batch, {"messages": messages, "applied": applied, **self._syncs(syncs)})

        return Measurement(key, "/s", run)

    def by_python(
        self, key: str, road: Road, form: Form, *, batch: int, connections: int, inbox: bool = True, processes: int = 1
    ) -> Measurement:
        """Measure one of the Python roads."""

        def run() -> Sample:
            self.business.reset()
            syncs = self.business.wal_syncs()
            job = Job(self.url, road, form, inbox, batch, connections, processes, self.seconds, self.ids)
            results = run_job(job)
            acked, distinct = sum(r.acked for r in results), sum(r.distinct for r in results)
            applied = distinct if inbox else acked
            if inbox and self.business.recorded() != distinct:
                raise WrongResult(f"{key}: {distinct} messages left {self.business.recorded()} records")
            self.business.check(applied, key)
            rate = sum(r.rate for r in results)
            cpu_us = sum(r.cpu_us * r.rate for r in results) / rate
            handed_back = sum(r.handed_back for r in results)
            seen = {"cpu_us": cpu_us, "messages": acked, "applied": applied, "handed_back": handed_back}
            return Sample(rate, seen | self._syncs(syncs))

        return Measurement(key, "/s", run)

    def _syncs(self, before: tuple[int, float]) -> dict[str, float]:
        syncs, ms = (after - earlier for after, earlier in zip(self.business.wal_syncs(), before, strict=True))
        return {"wal_syncs": syncs, "wal_sync_us": ms * 1000 / syncs if syncs else 0.0}

    def by_recording(self, way: str) -> Measurement:
        """Measure what one record costs the client."""

        def run() -> Sample:
            self.business.reset()
            sample, first = measure_record(self.url, way, RECORDS, self.ids)
            if first != self.business.recorded():
                raise WrongResult(f"{way}: {first} ids were first, {self.business.recorded()} are in the inbox")
            return sample

        return Measurement(way, "us", run)

    def measurements(self, connections: Sequence[int], batches: Sequence[int], processes: int) -> list[Measurement]:
        """Everything that one round measures, in its order: sides that are compared follow each other."""
        plan: list[Measurement] = [self.by_recording(way) for way in RECORD_WAYS]
        for count in connections:
            plan += self._single(count)
            plan += self._each(count)
            for batch in batches:
                plan += self._sets(batch, count)
            if _is_shared(count, processes):
                plan += self._in_processes(count, batches, processes)
        return plan

    def _single(self, count: int) -> list[Measurement]:
        def script(name: str, record: str | None) -> Measurement:
            text = single_script(record, self.ids)
            key = f"pgbench message{name}, {count}c"
            return self.by_pgbench(key, text, batch=1, connections=count, inbox=record is not None)

        def python(road: Road, *, inbox: bool = True) -> Measurement:
            key = f"{road} message{'' if inbox else ' no inbox'}, {count}c"
            return self.by_python(key, road, "message", batch=1, connections=count, inbox=inbox)

        return [
            script(" no inbox", None),
            script("", "plain"),
            script(" with our statement", "ours"),
            python("psycopg", inbox=False),
            python("psycopg"),
            python("bare", inbox=False),
            python("bare"),
            python("worker"),
        ]

    def _each(self, count: int) -> list[Measurement]:
        def python(road: Road, *, inbox: bool = True) -> Measurement:
            key = f"{road} each {HANDLER_BATCH}{'' if inbox else ' no inbox'}, {count}c"
            return self.by_python(key, road, "each", batch=HANDLER_BATCH, connections=count, inbox=inbox)

        return [python("psycopg", inbox=False), python("psycopg"), python("bare"), python("worker")]

    def _sets(self, batch: int, count: int) -> list[Measurement]:
        def script(*, inbox: bool) -> Measurement:
            text = batch_script(batch, inbox=inbox, ids=self.ids)
            key = f"pgbench set {batch}{'' if inbox else ' no inbox'}, {count}c"
            return self.by_pgbench(key, text, batch=batch, connections=count, inbox=inbox)

        def python(road: Road, *, inbox: bool = True) -> Measurement:
            key = f"{road} set {batch}{'' if inbox else ' no inbox'}, {count}c"
            return self.by_python(key, road, "set", batch=batch, connections=count, inbox=inbox)

        return [
            script(inbox=False),
            script(inbox=True),
            self.by_pgbench(
                f"pgbench set {batch} in one statement, {count}c",
                one_statement_script(batch, self.ids),
                batch=batch,
                connections=count,
                inbox=True,
            ),
            python("psycopg", inbox=False),
            python("psycopg"),
            python("bare"),
            python("worker"),
        ]

    def _in_processes(self, count: int, batches: Sequence[int], processes: int) -> list[Measurement]:
        forms: list[tuple[Form, int]] = [
            ("message", 1),
            ("each", HANDLER_BATCH),
            *(("set", batch) for batch in batches),
        ]
        return [
            self.by_python(
                f"worker {form}{'' if form == 'message' else f' {batch}'}, {count}c x{processes}",
                "worker",
                form,
                batch=batch,
                connections=count,
                processes=processes,
            )
            for form, batch in forms
        ]


def targets(connections: Sequence[int], batches: Sequence[int], processes: int) -> list[Target]:
    """What the consumer aims at; each is judged by the medians of the rounds."""
    goals = [
        Target(f"{way}: client processor time", way, None, RECORD_CPU_US, at_least=False)
        for way in RECORD_WAYS
        if way.startswith("Inbox")
    ]
    for count in connections:
        least = WORKER_ONE_CONNECTION if count < 16 else WORKER_SIXTEEN_CONNECTIONS
        suffixes = [f"{count}c"] + ([f"{count}c x{processes}"] if _is_shared(count, processes) else [])
        for suffix in suffixes if count in (1, 16) else []:
            for form in (f"each {HANDLER_BATCH}", "message"):
                meaning = f"worker, handler per message ({form}) against pgbench, {suffix}"
                goals.append(Target(meaning, f"worker {form}, {suffix}", f"pgbench message, {count}c", least, True))
        for batch in batches:
            least = SET_OF_TEN if batch < 100 else SET_OF_HUNDRED
            for suffix in suffixes:
                meaning = f"worker, batch handler of {batch} against pgbench, {suffix}"
                goals.append(
                    Target(meaning, f"worker set {batch}, {suffix}", f"pgbench set {batch}, {count}c", least, True)
                )
        for form in ["message", f"each {HANDLER_BATCH}", *(f"set {batch}" for batch in batches)]:
            meaning = f"worker's time over the bare loop's ({form}), {count}c"
            goals.append(Target(meaning, f"bare {form}, {count}c", f"worker {form}, {count}c", WORKER_OVERHEAD, False))
    if 1 in connections:
        # In a batch the commit is shared, and what is left of the time is the records themselves: see the tables.
        sides = ["pgbench message", "psycopg message", "bare message"]
        goals += [
            Target(
                f"time with the inbox over time without ({side}), 1c",
                f"{side} no inbox, 1c",
                f"{side}, 1c",
                INBOX_COST,
                False,
            )
            for side in sides
        ]
    return goals


def tables(
    connections: Sequence[int], batches: Sequence[int], processes: int
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Titles, and under each the keys to show with what they are held against."""
    shown = []
    for count in connections:
        places = [f"{count}c", f"{count}c x{processes}"]
        limit = f"pgbench message, {count}c"
        names = [f"{road} {form}" for form in ("message", f"each {HANDLER_BATCH}") for road in _ROADS]
        shown.append((f"messages a second, {count} connections; ratio to pgbench", _rows(names, places, limit)))
        for batch in batches:
            names = [f"{road} set {batch}" for road in _ROADS]
            limit = f"pgbench set {batch}, {count}c"
            title = f"messages a second in batches of {batch}, {count} connections; ratio to pgbench"
            shown.append((title, _rows(names, places, limit)))
    return shown


def _is_shared(connections: int, processes: int) -> bool:
    """Whether several processes with several connections each make sense."""
    return processes > 1 and connections >= 2 * processes and connections % processes == 0


_ROADS = ("pgbench", "psycopg", "bare", "worker")


def _rows(names: Sequence[str], places: Sequence[str], limit: str) -> list[tuple[str, str]]:
    variants = ("", " no inbox", " with our statement", " in one statement")
    return [(f"{name}{variant}, {place}", limit) for name in names for variant in variants for place in places]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, report, and return the exit status."""
    options = _parser().parse_args(arguments)
    console = Console()
    errors = Console(stderr=True)
    if options.list:
        return _list(options)
    with ExitStack() as stack:
        try:
            program = find_pgbench(options.pgbench)
            url = options.url or embedded(stack, track_wal_io_timing="on")
            business = stack.enter_context(Business(url))
            bench = Bench(url, program, business, options.seconds, options.ids)
            plan = chosen(bench.measurements(options.connections, options.batches, options.processes), options.only)
            if not plan:
                errors.print(f"no measurement has a key like {options.only!r}; see --list", markup=False)
                return 2
            console.print(f"{len(plan)} measurements, {options.rounds} rounds of {options.seconds:g} s each")
            figures = measured(console, plan, options.rounds)
            server = {"version": business.server_version(), "embedded": options.url is None, **business.settings()}
        except (PgbenchFailed, WrongResult) as error:
            errors.print(str(error), markup=False)
            return 1
    record_rows = [(way, "by hand, psycopg cursor") for way in RECORD_WAYS]
    print_figures(console, "client processor time to record one message", figures, record_rows)
    for title, rows in tables(options.connections, options.batches, options.processes):
        print_figures(console, title, figures, rows)
    goals = targets(options.connections, options.batches, options.processes)
    print_targets(console, figures, goals)
    write_json(options.json, figures, goals, kept(options), server)
    console.print(f"every figure is in {options.json}")
    return 0


def _list(options: argparse.Namespace) -> int:
    bench = Bench("", "", Business(""), options.seconds, options.ids)
    for measurement in chosen(
        bench.measurements(options.connections, options.batches, options.processes), options.only
    ):
        print(measurement.key)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="consumer.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=positive(float), default=2.0, help="per measurement (default: 2)")
    parser.add_argument("--connections", type=_numbers, default=[1, 4, 16], help="comma-separated (default: 1,4,16)")
    parser.add_argument(
        "--batches", type=_numbers, default=[10, 100, 1000], help="comma-separated (default: 10,100,1000)"
    )
    parser.add_argument(
        "--processes",
        type=positive(int),
        default=2,
        help="how many workers share the connections where there are enough, beside one that has them all (default: 2)",
    )
    parser.add_argument("--ids", choices=("v4", "v7"), default="v4", help="random ids, or ones that grow (default: v4)")
    add_options(parser, "consumer", rounds=3)
    return parser


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, not {text!r}") from None
    if min(numbers) < 1 or max(numbers) > MOST:
        raise argparse.ArgumentTypeError(f"each must be from 1 to {MOST}, not {text!r}")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
