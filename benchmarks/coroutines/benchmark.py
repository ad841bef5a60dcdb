"""Handlers that are coroutines: many that wait, beside what waiting allows; those of the database, beside threads."""

import asyncio
import time
from functools import partial
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from benchmarks.consumer.deliveries import PreparedSource, make_deliveries
from benchmarks.shared.database import AMOUNT, SCHEMA, SUBSCRIBER
from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run
from benchmarks.shared.work import Rate, in_processes, ready, window
from txbox import AsyncInbox, Inbox, Message
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

AT_ONCE = 64
WAIT_SECONDS = 0.02
ALLOWED = AT_ONCE / WAIT_SECONDS
CONNECTIONS = 4
DELIVERIES_PER_SECOND = 20_000
"""More than is reached here."""

LIMIT = f"what {AT_ONCE} waits of {WAIT_SECONDS * 1000:.0f} ms allow"
WAITS, SINGLE_WAITS = "AsyncWorker, they wait", "AsyncWorker, one a batch"
THREADS, COROUTINES = "Worker, of the database", "AsyncWorker, of the database"
IDLE = "AsyncWorker, idle"

UPDATE = text(f"UPDATE {SCHEMA}.account SET balance = balance + :amount WHERE account_id = :account")


def add(session: Session, message: Message) -> None:
    """Apply one message."""
    session.execute(UPDATE, {"amount": AMOUNT, "account": int(message.body)})


async def add_awaited(session: AsyncSession, message: Message) -> None:
    """Apply one message, as a coroutine."""
    await session.execute(UPDATE, {"amount": AMOUNT, "account": int(message.body)})


async def wait(_session: AsyncSession, _message: Message) -> None:
    """Wait for what is not the database."""
    await asyncio.sleep(WAIT_SECONDS)


def _source(seconds: float) -> PreparedSource:
    return PreparedSource(make_deliveries(int((seconds + 1) * DELIVERIES_PER_SECOND), distance=10_000), 10)


def by_threads(_number: int, url: str, seconds: float) -> tuple[Rate, int, int]:
    """Consume with threads; return the rate, how many deliveries were acked, and of how many messages."""
    source = _source(seconds)
    engine = create_engine(url, pool_size=CONNECTIONS, max_overflow=2)
    inbox = Inbox(SUBSCRIBER, schema=SCHEMA)
    ready()
    worker = Worker(source, inbox=inbox, engine=engine, handler=add, threads=CONNECTIONS, prefetch=1_000)
    worker.start()
    rate = window(lambda: source.acked, seconds, source.used_up)
    if not worker.stop():
        raise RuntimeError("the worker did not drain")
    engine.dispose()
    return rate, source.acked, source.distinct_acked()


def by_coroutines(
    _number: int, url: str, seconds: float, handler: Any, concurrency: int, batch_size: int
) -> tuple[Rate, int, int]:
    """Consume with coroutines; return as ``by_threads``."""
    source = _source(seconds)

    async def consume() -> Rate:
        engine = create_async_engine(url, pool_size=concurrency, max_overflow=2)
        inbox = AsyncInbox(SUBSCRIBER, schema=SCHEMA)
        worker = AsyncWorker(
            source, inbox=inbox, engine=engine, handler=handler, concurrency=concurrency, batch_size=batch_size
        )
        async with worker:
            rate = await asyncio.to_thread(window, lambda: source.acked, seconds, source.used_up)
        await engine.dispose()
        return rate

    ready()
    return asyncio.run(consume()), source.acked, source.distinct_acked()


def idle(_number: int, url: str, seconds: float) -> float:
    """Return the share of a processor, in percent, that a worker takes to which nothing comes."""

    async def stay_idle() -> float:
        engine = create_async_engine(url, pool_size=AT_ONCE)
        source = MemorySource(wait_seconds=20)
        inbox = AsyncInbox(SUBSCRIBER, schema=SCHEMA)
        async with AsyncWorker(source, inbox=inbox, engine=engine, handler=wait, concurrency=AT_ONCE):
            await asyncio.sleep(1)
            cpu, began = time.process_time(), time.monotonic()
            await asyncio.sleep(seconds)
            share = (time.process_time() - cpu) / (time.monotonic() - began)
        await engine.dispose()
        return share * 100

    ready()
    return asyncio.run(stay_idle())


def tables(run: Run) -> list[Table]:
    """What coroutines reach, beside a limit and beside threads."""
    seconds = run.options["seconds"]

    def consumed(work: Any, *arguments: Any) -> Sample:
        run.database.reset()
        rate, _, messages = in_processes(1, work, run.url, seconds, *arguments)[0]
        if run.database.recorded() != messages:
            raise WrongResult(f"{messages} messages were acked, {run.database.recorded()} are in the inbox")
        return Sample(rate.per_second, {"cpu_us": rate.cpu_us})

    def idle_share() -> Sample:
        run.database.reset()
        return Sample(in_processes(1, idle, run.url, run.options["idle_seconds"])[0])

    waits = partial(consumed, by_coroutines, wait, AT_ONCE)
    return [
        Table(
            f"{AT_ONCE} that wait {WAIT_SECONDS * 1000:.0f} ms",
            [
                Row(LIMIT, lambda: Sample(ALLOWED)),
                Row(WAITS, partial(waits, 10), LIMIT, at_least=0.9, ours=True),
                Row(SINGLE_WAITS, partial(waits, 1), LIMIT, ours=True),
            ],
        ),
        Table(
            f"{CONNECTIONS} connections",
            [
                Row(THREADS, partial(consumed, by_threads)),
                Row(
                    COROUTINES,
                    partial(consumed, by_coroutines, add_awaited, CONNECTIONS, 10),
                    THREADS,
                    at_least=0.8,
                    ours=True,
                ),
            ],
        ),
        Table(
            "processor time while nothing comes",
            [Row(IDLE, idle_share, at_most=1.0, unit="%", ours=True)],
            plotted=False,
        ),
    ]


BENCHMARK = Benchmark(
    name="coroutines",
    title="Messages that a worker with coroutine handlers consumes a second",
    description="Measure AsyncWorker: handlers that wait, handlers of the database, and nothing to do.",
    options={
        "rounds": Option("how often each is measured", 3, 7),
        "seconds": Option("of each measurement", 4.0, 10.0),
        "idle_seconds": Option("of the measurement without messages", 20.0, 60.0),
    },
    tables=tables,
)
