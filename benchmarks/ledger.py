"""The benchmark of the ledgers: what a lease costs, beside the least that could be written down by hand.

Every message is acquired and completed, once, in two round trips that commit by themselves.
"""

import argparse
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from business import SCHEMA, SUBSCRIBER, Business, WrongResult, conninfo
from pgbench import PgbenchFailed, find_pgbench, run_pgbench
from report import Target, print_figures, print_targets, write_json
from rich.console import Console
from rounds import Measurement, Sample
from running import add_options, chosen, embedded, kept, measured, positive
from sqlalchemy import create_engine

from txbox import idempotent
from txbox.leases import LeaseState, Ledger, PostgresLedger
from txbox.leases.statements import lease_statements

DESCRIPTION = """\
Acquire and complete leases, by several roads:

  pgbench conditional UPDATE   the limit: rows that are there already are taken by one conditional UPDATE and completed
                               by another, with nothing of what a ledger keeps: no insert, no fence, no attempts
  pgbench our statements       the ledger's own two statements, with a client that costs nothing
  psycopg our statements       the same from Python, by psycopg's cursor
  PostgresLedger               acquire() and complete()
  idempotent                   a decorated function that does nothing
  DynamoDBLedger               acquire() and complete(), against a local server that is written in Python: its figures
                               say how many calls there are, and nothing of AWS

A measurement's key is "road, connections". After each the completed messages are counted by SQL.
"""

CONNECTIONS = (1, 4, 16)

LEAST_OF_LIMIT = 0.35
"""SQLAlchemy's idiomatic road reaches 0.26 of pgbench in the consumer's table of TARGETS, at one connection."""

TABLE = f"{SCHEMA}.message_lease"
PLAIN = f"{SCHEMA}.plain_lease"
PLAIN_ROWS = 400_000
COUNT = f"SELECT count(*) FROM {TABLE} WHERE completed_at IS NOT NULL"


@dataclass(frozen=True)
class Bench:
    """Where to measure, and for how long."""

    url: str
    pgbench: str
    business: Business
    seconds: float

    def reset(self) -> None:
        """Start over, with no leases."""
        self.business.execute(f"TRUNCATE {TABLE}")
        self.business.checkpoint()

    def by_conditional_update(self, count: int) -> Measurement:
        """Measure the limit."""
        script = (
            "\\set n :n + 1\n"
            f"UPDATE {PLAIN} SET state = 'taken', until = clock_timestamp() + interval '30 s' "
            f"WHERE id = :n * {count} + :client_id AND (state = 'free' OR state = 'taken' AND until < now());\n"
            f"UPDATE {PLAIN} SET state = 'done' WHERE id = :n * {count} + :client_id AND state = 'taken';\n"
        )

        def run() -> Sample:
            self.business.execute(f"DROP TABLE IF EXISTS {PLAIN}")
            # Room on each page, so that no update has to leave it: the best that Postgres can do.
            self.business.execute(
                f"CREATE TABLE {PLAIN} (id bigint PRIMARY KEY, state text NOT NULL, until timestamptz) "
                "WITH (fillfactor=40)"
            )
            self.business.execute(
                f"INSERT INTO {PLAIN} SELECT number, 'free' FROM generate_series(1, {PLAIN_ROWS}) AS number"
            )
            self.business.execute(f"VACUUM ANALYZE {PLAIN}")
            self.business.checkpoint()
            result = self._pgbench(script, count)
            done = self.business.number(f"SELECT count(*) FROM {PLAIN} WHERE state = 'done'")
            if done < 0.99 * result.transactions:
                raise WrongResult(f"conditional UPDATE, {count}c: {result.transactions} transactions, {done} rows done")
            return Sample(result.tps, {"messages": done})

        return Measurement(f"pgbench conditional UPDATE, {count}c", "/s", run)

    def by_our_statements(self, count: int) -> Measurement:
        """Measure the ledger's statements by pgbench."""
        message = f"'m-' || :client_id::text || '-' || :n::text"  # noqa: F541
        acquire, complete = (
            (statement % {**_VALUES, "message": f"({message})", "fence": ":fence", "result": "NULL::bytea"})
            .strip()
            .replace("\n", " ")
            for statement in (lease_statements(SCHEMA).acquire, lease_statements(SCHEMA).complete)
        )
        script = f"\\set n :n + 1\n{acquire} \\gset\n{complete};\n"

        def run() -> Sample:
            self.reset()
            result = self._pgbench(script, count)
            done = self.business.number(COUNT)
            if done != result.transactions:
                raise WrongResult(f"our statements, {count}c: {result.transactions} transactions, {done} completed")
            return Sample(result.tps, {"messages": done})

        return Measurement(f"pgbench our statements, {count}c", "/s", run)

    def by_psycopg(self, count: int) -> Measurement:
        """Measure them by psycopg."""
        statements = lease_statements(SCHEMA)
        acquire, complete = statements.acquire.encode(), statements.complete.encode()

        @contextmanager
        def client() -> Iterator[Callable[[str], object]]:
            with psycopg.connect(conninfo(self.url), autocommit=True) as connection:
                cursor = connection.cursor()
                asking = {
                    "subscriber": SUBSCRIBER,
                    "owner": "benchmark",
                    "fingerprint": None,
                    "seconds": 30.0,
                    "latest": None,
                }

                def work(message_id: str) -> None:
                    row = cursor.execute(acquire, {**asking, "message": message_id}).fetchone()
                    assert row is not None
                    key = {"subscriber": SUBSCRIBER, "message": message_id, "fence": row[0], "result": None}
                    assert cursor.execute(complete, key).rowcount == 1

                yield work

        return self._in_python(f"psycopg our statements, {count}c", count, client)

    def by_ledger(self, count: int) -> Measurement:
        """Measure ``PostgresLedger``."""

        @contextmanager
        def client() -> Iterator[Callable[[str], object]]:
            with self._ledger() as ledger:
                yield lambda message_id: _acquire_and_complete(ledger, message_id)

        return self._in_python(f"PostgresLedger, {count}c", count, client)

    def by_idempotent(self, count: int) -> Measurement:
        """Measure a decorated function."""

        @contextmanager
        def client() -> Iterator[Callable[[str], object]]:
            with self._ledger() as ledger:
                yield idempotent(lambda _: None, ledger=ledger, identify=lambda message_id: message_id)

        return self._in_python(f"idempotent, {count}c", count, client)

    def by_dynamodb(self, stack: ExitStack) -> Measurement:
        """Measure ``DynamoDBLedger`` against a local server, which is started now."""
        import boto3

        from txbox_aws.dynamodb import DynamoDBLedger, create_lease_table
        from txbox_local import LocalAws

        made: list[Any] = []

        def run() -> Sample:
            if not made:
                environment = stack.enter_context(LocalAws()).environment()
                options = {
                    "endpoint_url": environment["AWS_ENDPOINT_URL"],
                    "aws_access_key_id": environment["AWS_ACCESS_KEY_ID"],
                    "aws_secret_access_key": environment["AWS_SECRET_ACCESS_KEY"],
                    "region_name": environment["AWS_DEFAULT_REGION"],
                }
                made.append(boto3.client("dynamodb", **options))  # type: ignore[call-overload]
                create_lease_table("benchmark", client=made[0])
            calls = 0

            def count_call(**_: object) -> None:
                nonlocal calls
                calls += 1

            made[0].meta.events.register("before-call.dynamodb", count_call)
            ledger = DynamoDBLedger(SUBSCRIBER, table="benchmark", client=made[0])
            sample = _for_some_time(self.seconds, lambda message_id: _acquire_and_complete(ledger, message_id))
            made[0].meta.events.unregister("before-call.dynamodb", count_call)
            return Sample(sample.value, {**sample.details, "calls": calls / max(sample.details["messages"], 1)})

        return Measurement("DynamoDBLedger, 1c", "/s", run)

    def plan(self, connections: Sequence[int], stack: ExitStack) -> list[Measurement]:
        """Everything that one round measures, in its order: sides that are compared follow each other."""
        roads = (
            self.by_conditional_update,
            self.by_our_statements,
            self.by_psycopg,
            self.by_ledger,
            self.by_idempotent,
        )
        return [*(road(count) for count in connections for road in roads), self.by_dynamodb(stack)]

    def _pgbench(self, script: str, count: int) -> Any:
        return run_pgbench(self.pgbench, self.url, script, connections=count, seconds=self.seconds, variables={"n": 0})

    @contextmanager
    def _ledger(self) -> Iterator[Ledger]:
        engine = create_engine(self.url, pool_size=1)
        try:
            yield PostgresLedger(engine, SUBSCRIBER, schema=SCHEMA)
        finally:
            engine.dispose()

    def _in_python(self, key: str, count: int, client: Callable[[], Any]) -> Measurement:
        """Measure a road with so many clients, each in a thread with a connection of its own."""

        def run() -> Sample:
            self.reset()
            samples: list[Sample] = []
            gate = threading.Barrier(count)

            def work() -> None:
                with client() as one:
                    one(f"warm-up-{uuid.uuid4()}")
                    gate.wait()
                    samples.append(_for_some_time(self.seconds, one))

            threads = [threading.Thread(target=work) for _ in range(count)]
            cpu = time.process_time()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            cpu = time.process_time() - cpu
            messages = sum(sample.details["messages"] for sample in samples)
            if len(samples) != count or self.business.number(COUNT) != messages + count:
                raise WrongResult(f"{key}: {messages} messages left {self.business.number(COUNT)} completed leases")
            medians = [sample.details["median_us"] for sample in samples]
            details = {"messages": messages, "cpu_us": cpu / messages * 1e6, "median_us": statistics.median(medians)}
            return Sample(sum(sample.value for sample in samples), details)

        return Measurement(key, "/s", run)


def _for_some_time(seconds: float, work: Callable[[str], object]) -> Sample:
    took: list[float] = []
    begun = now = time.perf_counter()
    while now - begun < seconds:
        work(str(uuid.uuid4()))
        took.append(time.perf_counter() - now)
        now = time.perf_counter()
    return Sample(len(took) / (now - begun), {"messages": len(took), "median_us": statistics.median(took) * 1e6})


def _acquire_and_complete(ledger: Ledger, message_id: str) -> None:
    acquisition = ledger.acquire(message_id)
    assert acquisition.state is LeaseState.ACQUIRED
    assert acquisition.lease is not None
    ledger.complete(acquisition.lease)


_VALUES = {
    "subscriber": f"'{SUBSCRIBER}'",
    "owner": "'benchmark'",
    "fingerprint": "NULL::bytea",
    "seconds": "30",
    "latest": "NULL",
}


def targets(connections: Sequence[int]) -> list[Target]:
    """What the ledger aims at."""
    return [
        Target(
            f"acquire and complete against a plain conditional UPDATE by pgbench, {count}c",
            f"PostgresLedger, {count}c",
            f"pgbench conditional UPDATE, {count}c",
            LEAST_OF_LIMIT,
            at_least=True,
        )
        for count in connections
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, report, and return the exit status."""
    options = _parser().parse_args(arguments)
    console, errors = Console(), Console(stderr=True)
    with ExitStack() as stack:
        try:
            program = "" if options.list else find_pgbench(options.pgbench)
            url = "" if options.list else options.url or embedded(stack, max_wal_size="4GB")
            business = Business(url)
            bench = Bench(url, program, business, options.seconds)
            plan = chosen(bench.plan(options.connections, stack), options.only)
            if options.list:
                for one in plan:
                    print(one.key)
                return 0
            if not plan:
                errors.print(f"no measurement has a key like {options.only!r}; see --list", markup=False)
                return 2
            stack.enter_context(business)
            figures = measured(console, plan, options.rounds)
            server = {"version": business.server_version(), "embedded": options.url is None, **business.settings()}
        except (PgbenchFailed, WrongResult) as error:
            errors.print(str(error), markup=False)
            return 1
    for count in options.connections:
        limit = f"pgbench conditional UPDATE, {count}c"
        roads = ("pgbench our statements", "psycopg our statements", "PostgresLedger", "idempotent")
        rows: list[tuple[str, str | None]] = [(limit, None), *((f"{road}, {count}c", limit) for road in roads)]
        print_figures(console, f"messages acquired and completed a second, {count} connections", figures, rows)
    print_figures(console, "against a local DynamoDB", figures, [("DynamoDBLedger, 1c", None)])
    _print_round_trips(console, figures.samples)
    print_targets(console, figures, targets(options.connections))
    write_json(options.json, figures, targets(options.connections), kept(options), server)
    console.print(f"every figure is in {options.json}")
    return 0


def _print_round_trips(console: Console, samples: dict[str, list[Sample]]) -> None:
    for key, found in samples.items():
        took = [sample.details["median_us"] for sample in found if "median_us" in sample.details]
        calls = [sample.details["calls"] for sample in found if "calls" in sample.details]
        if took:
            beside = f", {statistics.median(calls):.2f} calls" if calls else ""
            console.print(f"{key}: {statistics.median(took):,.0f} us for a message{beside}", highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ledger.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=positive(float), default=3.0, help="per measurement (default: 3)")
    parser.add_argument(
        "--connections", type=int, nargs="+", default=CONNECTIONS, help="how many at once (default: 1 4 16)"
    )
    add_options(parser, "ledger", rounds=3)
    return parser


if __name__ == "__main__":
    sys.exit(main())
