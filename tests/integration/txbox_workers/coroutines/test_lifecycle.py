"""Start, stop, pause and run of a worker with coroutines, on one event loop and on another."""

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from support.waiting import wait_until
from support.workers.async_worker import apply, make, work_off
from support.workers.business import Business, once
from support.workers.memory_worker import messages, numbered
from txbox import InvalidConfiguration, Message, SchemaMissing, TxboxError
from txbox_workers.memory_source import MemorySource

pytestmark = pytest.mark.anyio


async def until(condition: Any, timeout: float = 30) -> None:
    await asyncio.to_thread(wait_until, condition, timeout=timeout)


async def test_a_handler_may_stop_its_own_worker(business: Business, async_engine: AsyncEngine) -> None:
    answers: list[bool] = []

    async def handle(session: Any, message: Message) -> None:
        await apply(session, message)
        answers.append(await worker.stop(0.1))

    worker = make(MemorySource(messages("a", "b")), async_engine, handle, batch_size=1, concurrency=1)
    async with asyncio.timeout(30):
        assert await worker.run() is True, "run ends by it, too"
    assert answers == [False]
    assert business.applied() == once("a")


async def test_a_run_ends_by_a_signal_and_gives_the_signals_back(business: Business, async_engine: AsyncEngine) -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def handle(session: Any, message: Message) -> None:
        await apply(session, message)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)

    worker = make(MemorySource(messages("a", "b")), async_engine, handle, batch_size=1, concurrency=1)
    async with asyncio.timeout(30):
        assert await worker.run() is True
    assert business.applied() == once("a"), "what was begun is finished, and nothing more is begun"
    assert signal.getsignal(signal.SIGTERM) is before


async def test_a_start_says_what_is_missing_and_leaves_nothing(
    fresh_database: str, business: Business, no_threads: None
) -> None:
    engine = create_async_engine(fresh_database)
    with pytest.raises(SchemaMissing):
        await make(MemorySource(), engine).start()
    with pytest.raises(SchemaMissing):
        await make(MemorySource(), engine).run()
    await engine.dispose()
    away = create_async_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    with pytest.raises(TxboxError, match="the database cannot be used"):
        await make(MemorySource(), away).start()


async def test_two_workers_of_one_loop_share_a_source_and_an_engine(
    business: Business, async_engine: AsyncEngine
) -> None:
    source = MemorySource([*numbered(100), *numbered(100)])
    async with make(source, async_engine, concurrency=4), make(source, async_engine, concurrency=4):
        assert await asyncio.to_thread(source.wait_until_empty, 60)
    assert business.applied() == once(one.id for one in numbered(100))


def test_a_worker_that_was_stopped_starts_again_on_another_loop(business: Business, schema_url: str) -> None:
    """With an engine whose connections were closed before its first loop ended, as SQLAlchemy asks for."""
    engine = create_async_engine(schema_url)
    source = MemorySource(messages("a"))
    worker = make(source, engine)

    async def run() -> None:
        async with worker:
            assert await asyncio.to_thread(source.wait_until_empty, 30)
        await engine.dispose()

    asyncio.run(run())
    source.send(messages("b")[0])
    asyncio.run(run())
    assert business.applied() == once("ab")


async def test_a_run_that_is_cancelled_while_handlers_wait_gives_them_back_at_once(
    business: Business, async_engine: AsyncEngine
) -> None:
    begun: list[str] = []

    async def handle(session: Any, message: Message) -> None:
        await apply(session, message)
        begun.append(message.id)
        try:
            await asyncio.sleep(60)
        finally:
            await apply(session, message)  # it finds the connection as a cancelled wait has left it

    source = MemorySource(numbered(20))
    running = asyncio.create_task(make(source, async_engine, handle, batch_size=1, concurrency=10).run())
    await until(lambda: len(begun) == 10)
    running.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await running
    assert business.applied() == {}
    await work_off(source, async_engine)
    assert business.applied() == once(one.id for one in numbered(20))


async def test_a_run_that_is_cancelled_while_it_drains_waits_for_no_handler(
    business: Business, async_engine: AsyncEngine
) -> None:
    begun = asyncio.Event()

    async def handle(session: Any, message: Message) -> None:
        await apply(session, message)
        begun.set()
        await asyncio.sleep(60)

    source = MemorySource(messages("a"))
    worker = make(source, async_engine, handle)
    running = asyncio.create_task(worker.run())
    await begun.wait()
    await worker.stop(0.1)
    await asyncio.sleep(0.7)  # run looks every half second
    running.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not worker.running
    await work_off(source, async_engine)
    assert business.applied() == once("a")


class SlowSource(MemorySource):
    """One that takes its time to open, as a client of AWS may."""

    def open(self) -> None:
        time.sleep(0.5)  # nothing signals that a start was cancelled meanwhile


async def test_a_start_that_is_cancelled_leaves_nothing_at_work(business: Business, async_engine: AsyncEngine) -> None:
    source = SlowSource(messages("a"))
    worker = make(source, async_engine)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), worker:
            raise AssertionError("it has started in no time")
    assert not worker.running
    assert business.applied() == once("")
    async with make(source, async_engine):
        await until(lambda: business.applied() == once("a"))


async def test_a_second_run_is_refused_and_the_first_goes_on(business: Business, async_engine: AsyncEngine) -> None:
    source = MemorySource()
    async with make(source, async_engine) as worker:
        with pytest.raises(InvalidConfiguration, match="running already"):
            await worker.run()
        source.send(messages("a")[0])
        await until(lambda: business.applied() == once("a"))
        assert worker.running


async def test_starts_and_stops_need_no_thread_of_the_loop_s_own(business: Business, async_engine: AsyncEngine) -> None:
    release = threading.Event()
    asyncio.get_running_loop().set_default_executor(threads := ThreadPoolExecutor(1))
    threads.submit(release.wait, 60)
    async with asyncio.timeout(20):
        async with make(MemorySource(messages("a")), async_engine):
            while business.applied() != once("a"):
                await asyncio.sleep(0.02)
    release.set()


@pytest.fixture
def swept() -> Iterator[None]:
    """What a test leaves as garbage is found before the next one begins, which would be told of it."""
    yield
    gc.collect()


@pytest.mark.usefixtures("swept")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of connections, as their loop has ended with them
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_ends_under_a_worker_leaves_nothing_in_its_hands(
    engine: Engine, business: Business, named_url: URL, schema_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = MemorySource(numbered(60))
    lost = create_async_engine(named_url, pool_size=5)
    taken = threading.Event()

    async def handle(session: Any, message: Message) -> None:
        taken.set()
        await asyncio.sleep(0.05)
        await apply(session, message)

    worker = make(source, lost, handle, batch_size=1, concurrency=2)

    async def forget_to_stop() -> None:
        await worker.start()
        await asyncio.to_thread(taken.wait, 30)

    asyncio.run(forget_to_stop())
    wait_until(lambda: not worker.running and not source._taken, "it stops by itself", timeout=30)
    assert "the event loop has ended, and the worker was not stopped before" in caplog.text
    with engine.begin() as connection:  # as at the end of the process
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
            (named_url.query["application_name"],),
        )

    async def finish() -> None:
        fresh = create_async_engine(schema_url, pool_size=5)
        async with make(source, fresh):
            await until(lambda: business.applied().total() == 60)
        await fresh.dispose()

    asyncio.run(finish())
    assert business.applied() == once(one.id for one in numbered(60))
    lost.sync_engine.dispose(close=False)
