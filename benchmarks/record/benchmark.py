"""What recording costs the client: processor time for one message, many times in one transaction."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from benchmarks.consumer.deliveries import make_deliveries
from benchmarks.shared.database import INSERT_ONE, SCHEMA, SUBSCRIBER, conninfo
from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run
from benchmarks.shared.work import in_processes, ready
from txbox import Inbox

WARM_UP = 200
RECORD_CPU_US = 60
CONNECTION, SESSION = "Inbox.record(connection)", "Inbox.record(session)"
CURSOR, BY_HAND = "by hand, psycopg cursor", "by hand, SQLAlchemy connection"

Record = Callable[[str], bool]


def record_all(_number: int, url: str, way: str, count: int) -> tuple[Sample, int]:
    """Record messages in one transaction; return microseconds of processor time for each, and how many were first."""
    deliveries = make_deliveries(WARM_UP + count, distance=WARM_UP)
    ids = [delivery.message.id for delivery in deliveries]
    with _WAYS[way](url) as record:
        ready()
        first = sum(map(record, ids[:WARM_UP]))
        cpu, begun = time.process_time(), time.perf_counter()
        first += sum(map(record, ids[WARM_UP:]))
        cpu, passed = time.process_time() - cpu, time.perf_counter() - begun
    return Sample(cpu / count * 1e6, {"wall_us": passed / count * 1e6}), first


@contextmanager
def _on_connection(url: str) -> Iterator[Record]:
    inbox = Inbox(SUBSCRIBER, schema=SCHEMA)
    with create_engine(url).begin() as connection:
        yield lambda message_id: inbox.record(connection, message_id)


@contextmanager
def _on_session(url: str) -> Iterator[Record]:
    inbox = Inbox(SUBSCRIBER, schema=SCHEMA)
    with Session(create_engine(url)) as session, session.begin():
        yield lambda message_id: inbox.record(session, message_id)


@contextmanager
def _on_cursor(url: str) -> Iterator[Record]:
    with psycopg.connect(conninfo(url)) as connection:
        cursor = connection.cursor()
        yield lambda message_id: cursor.execute(INSERT_ONE, (message_id,)).rowcount == 1


@contextmanager
def _by_hand(url: str) -> Iterator[Record]:
    with create_engine(url).begin() as connection:
        yield lambda message_id: connection.exec_driver_sql(INSERT_ONE, (message_id,)).rowcount == 1


_WAYS = {CONNECTION: _on_connection, SESSION: _on_session, CURSOR: _on_cursor, BY_HAND: _by_hand}


def tables(run: Run) -> list[Table]:
    """Ours beside the least that is written by hand."""

    def measured(way: str) -> Sample:
        run.database.reset()
        sample, first = in_processes(1, record_all, run.url, way, run.options["messages"])[0]
        if first != run.database.recorded():
            raise WrongResult(f"{way}: {first} ids were first, {run.database.recorded()} are in the inbox")
        return sample

    def row(way: str, to: str | None = None, at_most: float | None = None) -> Row:
        return Row(way, partial(measured, way), to, at_most=at_most, unit="us", ours=at_most is not None)

    ours = [row(way, at_most=RECORD_CPU_US) for way in (CONNECTION, SESSION)]
    return [Table("processor time of the client", [row(CURSOR), row(BY_HAND, CURSOR), *ours])]


BENCHMARK = Benchmark(
    name="record",
    title="What recording one message costs the client",
    description="Measure the client's processor time to record one message, many times in one transaction.",
    options={
        "rounds": Option("how often each is measured", 5, 15),
        "messages": Option("recorded each time", 10_000, 30_000),
    },
    tables=tables,
)
