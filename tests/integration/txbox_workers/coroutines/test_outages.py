"""An outage of the database while many batches are under way: one of them waits, and asks, for all."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from support.postgres.tcp_proxy import TcpProxy
from support.txbox.events import Kept
from support.waiting import wait_until
from support.workers.async_worker import apply, make
from support.workers.business import Business, once
from support.workers.memory_worker import messages, numbered
from txbox import Message, Outcome
from txbox.instrumentation import DatabaseLost, DatabaseRestored, Settled
from txbox.postgres.drivers.greenlets import sleep
from txbox_workers.memory_source import MemorySource

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("delivered_before", [False, True])
async def test_one_of_sixteen_batches_waits_and_says_so(
    engine: Engine, business: Business, proxy: TcpProxy, schema_url: str, delivered_before: bool
) -> None:
    """The same for deliveries whose attempts were counted in advance, and are taken back when that is possible."""
    begun: list[str] = []
    cut = asyncio.Event()

    async def handle(session: Any, message: Message) -> None:
        await apply(session, message)
        begun.append(message.id)
        await cut.wait()

    source, kept = MemorySource(numbered(50)), Kept()
    if delivered_before:
        for one in list(source._ready):
            object.__setattr__(one, "receive_count", 5)
    url = make_url(schema_url).set(host="127.0.0.1", port=proxy.port)
    used = create_async_engine(url, pool_size=18)
    worker = make(source, used, handle, concurrency=16, batch_size=1, max_attempts=6, hooks=[kept])
    activity = worker._worker._activity
    async with worker:
        await asyncio.to_thread(wait_until, lambda: len(begun) == 16)
        proxy.refuse()
        proxy.cut()
        cut.set()
        await asyncio.to_thread(wait_until, lambda: activity.awaiting_threads == 1)
        await asyncio.to_thread(wait_until, lambda: len(kept.of(DatabaseLost)) >= 5)
        if not delivered_before:  # else they are kept until it is saved that these were no attempts
            await asyncio.to_thread(wait_until, lambda: not source._taken, "all is handed back")
        settled = len(kept.of(Settled))
        lost = len(kept.of(DatabaseLost))
        await asyncio.to_thread(wait_until, lambda: len(kept.of(DatabaseLost)) >= lost + 3)
        assert activity.awaiting_threads == 1
        assert len(kept.of(Settled)) == settled, "nothing was received, to be handed back, meanwhile"
        proxy.accept()
        assert await asyncio.to_thread(source.wait_until_empty, 60)
    await used.dispose()
    assert business.applied() == once(one.id for one in numbered(50))
    assert business.failing() == {}
    assert business.letters() == {}
    assert len(kept.of(DatabaseRestored)) <= 3, "of the batch that waits, of a report, and of a late one"


async def test_what_joins_an_outage_at_its_end_is_kept_until_it_is_saved(
    business: Business, proxy: TcpProxy, schema_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, kept = MemorySource(messages("a", "b")), Kept()
    for one in list(source._ready):  # so their attempts are counted in advance, and taken back
        object.__setattr__(one, "receive_count", 5)
    b_began, b_goes_on = asyncio.Event(), asyncio.Event()

    async def handle(session: Any, message: Message) -> None:
        await apply(session, message)
        if message.id == "a" and not b_goes_on.is_set():
            await b_began.wait()
            proxy.cut()
        elif message.id == "b" and not b_goes_on.is_set():
            b_began.set()
            await b_goes_on.wait()
        await session.execute(text("SELECT 1"))

    url = make_url(schema_url).set(host="127.0.0.1", port=proxy.port)
    used = create_async_engine(url, pool_size=5)
    worker = make(source, used, handle, concurrency=2, batch_size=1, max_attempts=6, hooks=[kept])
    check = worker._worker._processor.check_recording

    def check_then_let_b_lose_its_connection() -> None:
        check()
        if not b_goes_on.is_set():
            proxy.refuse()
            proxy.cut()
            b_goes_on.set()
            runner = worker._worker._poller._runner  # type: ignore[union-attr]
            while not runner._joined:
                sleep(0.01)

    monkeypatch.setattr(worker._worker._processor, "check_recording", check_then_let_b_lose_its_connection)
    async with worker:
        await asyncio.to_thread(wait_until, b_goes_on.is_set)
        await asyncio.to_thread(wait_until, lambda: len(kept.of(DatabaseLost)) >= 3)
        proxy.accept()
        assert await asyncio.to_thread(source.wait_until_empty, 20), "something was never acked"
    await used.dispose()
    assert business.applied() == once("ab")
    assert business.failing() == {}
    assert Outcome.FAILED not in kept.outcomes("b")
