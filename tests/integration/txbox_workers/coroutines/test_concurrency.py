"""Many batches at once on one event loop: each with its own transaction, order and context."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import uvloop
from opentelemetry import trace
from sqlalchemy import URL, Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from support.txbox.traces import Traces, attributes
from support.waiting import wait_until
from support.workers.async_worker import Engines, apply, make, work_off
from support.workers.business import ADD, Business, once
from support.workers.memory_worker import AT_ONCE, messages, numbered
from txbox import DeadLetters, Message
from txbox.instrumentation import DatabaseLost, Retried, Settled
from txbox.instrumentation.log_context import messages_in_hand
from txbox.leases import PostgresLedger
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.delivery import Delivery
from txbox_workers.memory_source import MemorySource

pytestmark = pytest.mark.anyio


async def test_sixty_four_handlers_wait_at_once_each_in_its_transaction(
    business: Business, make_async_engine: Engines
) -> None:
    everybody = asyncio.Barrier(64)

    async def handle(session: Any, message: Message) -> None:
        await apply(session, message)
        async with asyncio.timeout(30):
            await everybody.wait()

    source = MemorySource(numbered(128))
    async with (
        make_async_engine(pool_size=66) as engine,
        make(source, engine, handle, concurrency=64, batch_size=1),
    ):
        assert await asyncio.to_thread(source.wait_until_empty, 60)
    assert business.applied() == once(one.id for one in numbered(128))


async def test_a_deadlock_between_two_coroutines_is_retried(business: Business, async_engine: AsyncEngine) -> None:
    met: set[str] = set()
    both_hold_one = asyncio.Barrier(2)

    async def handle(session: Any, message: Message) -> None:
        accounts = (1, 2) if message.id == "a" else (2, 1)
        await session.execute(ADD, {"account": accounts[0], "amount": 1})
        if message.id not in met:
            met.add(message.id)
            await both_hold_one.wait()
        await session.execute(ADD, {"account": accounts[1], "amount": 1})
        await apply(session, message)

    source = MemorySource(messages("a", "b"))
    kept = await work_off(source, async_engine, handle, concurrency=2, batch_size=1, max_attempts=1)
    assert (business.balance(1), business.balance(2)) == (2, 2)
    assert business.applied() == once("ab")
    assert [event.sqlstate for event in kept.of(Retried)] == ["40P01"]


@pytest.mark.parametrize("run_on", [asyncio.run, uvloop.run])
def test_what_runs_is_cut_off_and_cancelled_and_comes_again_on_either_loop(
    business: Business, make_async_engine: Engines, engine: Engine, run_on: Any
) -> None:
    met: set[str] = set()

    async def handle(session: Any, message: Message) -> None:
        await apply(session, message)
        if int(message.id[1:]) % 10 == 3 and message.id not in met:
            met.add(message.id)
            pid = await session.scalar(text("SELECT pg_backend_pid()"))
            await asyncio.to_thread(terminate, pid)
            await apply(session, message)

    def terminate(pid: int) -> None:
        with engine.connect() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})

    async def run() -> None:
        source = MemorySource(numbered(60))
        async with make_async_engine() as of_worker:
            cancelled = asyncio.create_task(make(source, of_worker, handle, concurrency=8).run())
            while len(met) < 2:
                await asyncio.sleep(0.001)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await work_off(source, of_worker, handle, concurrency=8)

    run_on(run())
    assert business.applied() == once(one.id for one in numbered(60))


@pytest.mark.usefixtures("without_reports")  # whose tasks cannot be made either
def test_a_batch_whose_task_cannot_be_made_is_handed_back(business: Business, make_async_engine: Engines) -> None:
    """On a loop of its own: anyio's would raise what the factory raises."""
    made = 0

    def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        nonlocal made
        if "LoopCalls" in coroutine.__qualname__:
            made += 1
            if made % 4 == 3:
                raise MemoryError("a task factory of the host's")
        return asyncio.Task(coroutine, loop=loop, **options)

    async def run() -> None:
        source = MemorySource(numbered(30))
        async with make_async_engine() as engine:
            worker = make(source, engine, concurrency=1, batch_size=1)
            await worker.start()
            asyncio.get_running_loop().set_task_factory(make_task)
            assert await asyncio.to_thread(source.wait_until_empty, 20), "the only place is free again each time"
            asyncio.get_running_loop().set_task_factory(None)
            assert await worker.stop()

    asyncio.run(run())
    assert made > 30
    assert business.applied() == once(one.id for one in numbered(30))


class ExtendedSource(MemorySource):
    """Its deliveries are the worker's for two seconds, and it notes how often they were extended."""

    visibility_seconds = 2.0
    extended = 0

    def extend_visibility(self, deliveries: Sequence[Delivery], seconds: float) -> Mapping[str, str]:
        self.extended += len(deliveries)
        return {}


async def test_a_handler_that_blocks_the_loop_keeps_its_delivery(business: Business, async_engine: AsyncEngine) -> None:
    source = ExtendedSource(messages("a"))

    async def handle(session: Any, message: Message) -> None:
        await apply(session, message)
        time.sleep(2.5)  # what it must not do

    await work_off(source, async_engine, handle)
    assert source.extended >= 2
    assert business.applied() == once(["a"])


async def test_each_handler_sees_its_own_message_in_the_log_and_in_its_span(
    business: Business, async_engine: AsyncEngine, caplog: Any
) -> None:
    """Ten batches of two are under way at once, and every one waits between all that it looks at."""
    caplog.set_level(logging.INFO, "host")
    traces = Traces()
    together = asyncio.Barrier(10)
    wrong: list[str] = []

    def look(message: Message) -> None:
        in_hand = messages_in_hand()
        if in_hand is None or in_hand.message_ids != (message.id,):
            wrong.append(f"{message.id}: {in_hand}")
        span: Any = trace.get_current_span()
        if attributes(span).get("messaging.message.id") != message.id:
            wrong.append(f"{message.id}: {dict(span.attributes)}")

    async def handle(session: Any, message: Message) -> None:
        look(message)
        await apply(session, message)
        look(message)
        async with asyncio.timeout(30):
            await together.wait()
        look(message)
        await asyncio.create_task(asyncio.sleep(0))
        look(message)
        if message.id.endswith("3"):
            with traces.tracer.start_as_current_span(f"of {message.id}"):
                await asyncio.sleep(0.001)

    source = MemorySource(numbered(100))
    kept = await work_off(source, async_engine, handle, concurrency=10, batch_size=2, tracing=traces.tracing)
    assert wrong == []
    assert len({one.message_id for one in kept.of(Settled)}) == 100
    handled = {
        one.context.span_id: attributes(one)["messaging.message.id"]
        for one in traces.of("process")
        if one.context is not None
    }
    own = [one for one in traces.all() if one.name.startswith("of ")]
    assert len(own) == 10
    for one in own:
        assert one.parent is not None
        assert f"of {handled[one.parent.span_id]}" == one.name
    assert business.applied() == once(one.id for one in numbered(100))


async def test_a_handler_that_blocks_the_loop_has_no_connection_of_another_cut(
    business: Business, named_url: URL
) -> None:
    """The watchdog finds a server that is idle, as it has answered: the answer waits in the socket for the loop."""
    runs: list[str] = []
    waiting = asyncio.Event()

    async def handle(session: AsyncSession, message: Message) -> None:
        runs.append(message.id)
        if message.id == "blocks":
            await waiting.wait()
            time.sleep(4)
            return
        waiting.set()
        await session.execute(text("SELECT pg_sleep(0.3)"))
        await apply(session, message)

    url = named_url.update_query_dict({"txbox_watchdog_seconds": "1"})
    engine = create_async_engine(url, pool_size=5)
    source = MemorySource(messages("blocks", "waits"))
    kept = await work_off(source, engine, handle, batch_size=1, concurrency=2)
    await engine.dispose()
    assert sorted(runs) == ["blocks", "waits"]
    assert not kept.of(DatabaseLost)
    assert business.applied() == once(["waits"])


WAITS_FOR_LOCK = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = %s::regclass"


@pytest.mark.parametrize("table", ["dead_letter", "worker_report"])
async def test_with_a_ledger_alone_the_loop_goes_on_while_dead_letters_and_reports_wait(
    engine: Engine, business: Business, table: str
) -> None:
    async def fail(message: Message) -> None:
        raise ValueError("no")

    source = MemorySource()
    ledger, letters = PostgresLedger("mailing", engine=engine), DeadLetters(engine)
    worker = AsyncWorker(
        source, ledger=ledger, dead_letters=letters, handler=fail, max_attempts=1, backoff=AT_ONCE, concurrency=1
    )
    loop = asyncio.get_running_loop()

    def hold_up() -> None:
        """Lock the table, and while the worker waits for it, ask the loop for an answer."""
        with engine.connect() as holder, engine.connect() as observer:
            holder.exec_driver_sql(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            source.send(messages("a")[0])
            observed = observer.execution_options(isolation_level="AUTOCOMMIT")

            def waits() -> Any:
                return observed.exec_driver_sql(WAITS_FOR_LOCK, (table,)).scalar_one()

            wait_until(waits, f"the worker waits for {table}", timeout=30)
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(60)
            assert waits(), "the loop answers before the wait has ended"

    async with worker:
        await asyncio.to_thread(hold_up)
        assert await asyncio.to_thread(source.wait_until_empty, 30)
    assert business.letters() == {"a": "failed"}
