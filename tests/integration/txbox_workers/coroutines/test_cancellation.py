"""``run()`` that is cancelled, at every await of a batch: what was under way rolls back, and comes again."""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import sqlalchemy
from psycopg import waiting
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncSession

from support.waiting import wait_until
from support.workers.async_worker import Engines
from support.workers.business import APPLY, Business, once
from support.workers.memory_worker import AT_ONCE, delivery, messages
from txbox import AsyncInbox, Message
from txbox.instrumentation import DatabaseLost, Event
from txbox.leases import PostgresLedger
from txbox.postgres.drivers.greenlets import run_in_greenlet
from txbox_workers.coroutines import AsyncWorker, batch_tasks
from txbox_workers.delivery import Delivery
from txbox_workers.memory_source import MemorySource

if sqlalchemy.__version__ < "2.1":
    # It leaves a connection to the garbage collector if it is cancelled while it sets it up; 2.1 closes it.
    pytestmark = pytest.mark.filterwarnings("ignore:.* was deleted while still open:ResourceWarning")

IDS = ["a", "b", "c"]


class Awaits:
    """Calls ``then`` when a batch waits for something for the ``number``-th time; ``seen`` are the waits so far."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int, then: Callable[[], object]) -> None:
        self.seen = 0
        self._number = number
        self._then = then

        async def counted(work: Callable[[], Any]) -> Any:
            if "BatchTasks" not in work.__qualname__:  # a check, or a report
                return await run_in_greenlet(work)
            return await _Counted(run_in_greenlet(work), self._note)

        patch.setattr(batch_tasks, "run_in_greenlet", counted)

    def _note(self) -> None:
        self.seen += 1
        if self.seen == self._number:
            self._then()


class _Counted:
    def __init__(self, awaitable: Awaitable[Any], note: Callable[[], object]) -> None:
        self._awaitable = awaitable
        self._note = note

    def __await__(self) -> Generator[Any, Any, Any]:
        inner: Any = self._awaitable.__await__()
        step: Callable[[], Any] = partial(inner.send, None)
        while True:
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value
            self._note()
            try:
                step = partial(inner.send, (yield waits_for))
            except BaseException as error:  # noqa: BLE001 - it is thrown into what waits
                step = partial(inner.throw, error)


async def apply(session: AsyncSession, message: Message) -> None:
    await session.execute(APPLY, {"id": message.id, "body": message.text})
    await asyncio.sleep(0)
    await session.execute(APPLY, {"id": f"{message.id} too", "body": ""})


def redelivered(source: MemorySource) -> MemorySource:
    """Have what the source holds counted as delivered before, so that it is processed singly, and counted."""
    source._ready = type(source._ready)(delivery(one.message.id, receive_count=4) for one in source._ready)
    return source


def take_rest(source: MemorySource, number: int) -> list[Delivery]:
    """Take from a source what it would deliver again, with receipts of their own."""
    with source._condition:
        assert not source._taken, "all is handed back"
        rest = [*source._ready, *(one for _, _, one in source._delayed)]
        source._ready.clear()
        source._delayed.clear()
        source._condition.notify_all()
    return [replace(one, receipt=f"{number}-{one.receipt}") for one in rest]


async def cancelled_at(number: int, worker: AsyncWorker, source: MemorySource, patch: pytest.MonkeyPatch) -> bool:
    """Cancel a run at an await of its batch; return whether it was: not, if it has fewer awaits."""
    with patch.context() as patch:
        awaits = Awaits(patch, number, lambda: running.cancel())
        running = asyncio.create_task(worker.run())
        empty = asyncio.create_task(asyncio.to_thread(source.wait_until_empty, 20))
        await asyncio.wait([running, empty], return_when=asyncio.FIRST_COMPLETED)
        if not (was_cut := awaits.seen >= number):
            running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not worker.running, "all of it has ended"
    return was_cut


def connections(engine: Engine, url: URL) -> list[tuple[str, int]]:
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT state, count(*) FROM pg_stat_activity WHERE application_name = %s GROUP BY state ORDER BY state",
            (url.query["application_name"],),
        )
        return [(str(state), int(count)) for state, count in rows]


@pytest.mark.parametrize("kind", ["together", "suspects", "ledger"])
def test_a_run_is_cancelled_at_each_await_of_a_batch(
    engine: Engine,
    named_url: URL,
    business: Business,
    make_async_engine: Engines,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    no_threads: None,
    kind: str,
) -> None:
    # psycopg lets the loop run between two calls only if it has been busy for a while: let it be busy always.
    monkeypatch.setattr(waiting, "MAX_BUSY_TIME", 0.0, raising=False)
    caplog.set_level(logging.WARNING)
    options: dict[str, Any] = {"inbox": AsyncInbox("billing", wait_seconds=0.2), "backoff": AT_ONCE, "concurrency": 2}
    if kind == "ledger":
        options["ledger"] = PostgresLedger("billing", engine=engine)
    events: list[Event] = []

    async def cut_everywhere() -> int:
        async with make_async_engine() as used:

            def make(source: MemorySource) -> AsyncWorker:
                return AsyncWorker(source, engine=used, handler=apply, hooks=[events.append], **options)

            left, number, was_cut = MemorySource(), 0, True
            while was_cut:
                number += 1
                source = MemorySource(messages(*(f"{number}-{one}" for one in IDS)), wait_seconds=0.01)
                if kind == "suspects":
                    redelivered(source)
                was_cut = await cancelled_at(number, make(source), source, monkeypatch)
                assert used.pool.checkedout() == 0
                await asyncio.to_thread(  # the server may see a moment later that a connection is closed
                    wait_until,
                    lambda: [state for state, _ in connections(engine, named_url)] in ([], ["idle"]),
                    f"no transaction is left of one that was cancelled at await {number}",
                )
                left._ready.extend(take_rest(source, number))
            async with make(left):
                assert await asyncio.to_thread(left.wait_until_empty, 60), "it comes again, and is applied"
            return number

    cuts = asyncio.run(cut_everywhere())
    gc.collect()
    assert cuts > 10, "a batch has so many awaits"
    ids = [f"{number}-{one}" for number in range(1, cuts + 1) for one in IDS]
    assert business.applied() == once([*ids, *(f"{one} too" for one in ids)]), "by the awaits of their cancellation"
    assert not [one for one in events if isinstance(one, DatabaseLost)], "it is no outage"
    assert business.letters() == {}
    assert business.failing() == {}, "a cancelled attempt does not count"
    assert not [one for one in caplog.records if one.levelno > logging.WARNING or "billing failed" in one.getMessage()]
