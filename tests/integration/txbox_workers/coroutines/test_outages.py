"""An outage of the database while many batches are under way: one of them waits, and asks, for all."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from support.postgres.tcp_proxy import TcpProxy
from support.txbox.events import Kept
from support.waiting import wait_until
from support.workers.async_worker import apply, make
from support.workers.business import Business, once
from support.workers.memory_worker import numbered
from txbox import Message
from txbox.instrumentation import DatabaseLost, DatabaseRestored, Settled
from txbox_workers.memory_source import MemorySource


@pytest.mark.parametrize("delivered_before", [False, True])
def test_one_of_sixty_four_batches_waits_and_says_so(
    engine: Engine, business: Business, proxy: TcpProxy, schema_url: str, delivered_before: bool
) -> None:
    """The same for deliveries whose attempts were counted in advance, and are taken back when that is possible."""

    async def run() -> Kept:
        begun: list[str] = []
        cut = asyncio.Event()

        async def handle(session: Any, message: Message) -> None:
            await apply(session, message)
            begun.append(message.id)
            await cut.wait()

        source, kept = MemorySource(numbered(200)), Kept()
        if delivered_before:
            for one in list(source._ready):
                object.__setattr__(one, "receive_count", 5)
        url = make_url(schema_url).set(host="127.0.0.1", port=proxy.port)
        used = create_async_engine(url, pool_size=66)
        worker = make(source, used, handle, concurrency=64, batch_size=1, max_attempts=6, hooks=[kept])
        activity = worker._worker._activity
        async with worker:
            await asyncio.to_thread(wait_until, lambda: len(begun) == 64)
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
        return kept

    kept = asyncio.run(run())
    assert business.applied() == once(one.id for one in numbered(200))
    assert business.failing() == {}
    assert business.letters() == {}
    assert len(kept.of(DatabaseRestored)) <= 3, "of the batch that waits, of a report, and of a late one"
