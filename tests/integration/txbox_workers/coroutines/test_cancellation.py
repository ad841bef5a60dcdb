"""``run()`` that is cancelled, at every await of a batch: what was under way rolls back, and comes again."""

import asyncio
import logging

import pytest
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from support.workers.async_worker import Engines
from support.workers.awaits import Awaits
from support.workers.business import APPLY, Business, once
from support.workers.memory_worker import AT_ONCE, delivery, messages
from txbox import AsyncInbox, Message
from txbox.instrumentation import DatabaseLost, Event
from txbox.leases import PostgresLedger
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.memory_source import MemorySource

IDS = ["a", "b", "c"]


async def apply(session: AsyncSession, message: Message) -> None:
    await session.execute(APPLY, {"id": message.id, "body": message.text})
    await asyncio.sleep(0)
    await session.execute(APPLY, {"id": f"{message.id} too", "body": ""})


def redelivered(source: MemorySource) -> MemorySource:
    """Have what the source holds counted as delivered before, so that it is processed singly, and counted."""
    source._ready = type(source._ready)(delivery(one.message.id, receive_count=4) for one in source._ready)
    return source


class Cut:
    """One run that is cancelled at an await, and a second one that works everything off."""

    def __init__(self, engine: AsyncEngine, source: MemorySource, **options: object) -> None:
        self.engine = engine
        self.source = source
        self.options = {"inbox": AsyncInbox("billing", wait_seconds=0.2), "backoff": AT_ONCE, **options}
        self.events: list[Event] = []

    def make(self) -> AsyncWorker:
        return AsyncWorker(
            self.source, engine=self.engine, handler=apply, hooks=[self.events.append], concurrency=2, **self.options
        )

    async def cancelled_at(self, number: int, patch: pytest.MonkeyPatch) -> bool:
        """Return whether the batch was cut: not, if it has fewer awaits."""
        with patch.context() as patch:
            worker = self.make()
            awaits = Awaits(patch, number, lambda: running.cancel())
            running = asyncio.create_task(worker.run())
            empty = asyncio.create_task(asyncio.to_thread(self.source.wait_until_empty, 20))
            await asyncio.wait([running, empty], return_when=asyncio.FIRST_COMPLETED)
            was_cut = awaits.seen >= number
            if not was_cut:
                running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert not worker.running, "all of it has ended"
        assert self.engine.pool.checkedout() == 0
        async with self.make():
            assert await empty, "it comes again, and is applied"
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
    async_engine: Engines,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    no_threads: None,
    kind: str,
) -> None:
    caplog.set_level(logging.WARNING)

    async def cut_everywhere() -> int:
        async with async_engine() as used:
            number = 0
            was_cut = True
            while was_cut:
                number += 1
                ids = [f"{number}-{one}" for one in IDS]
                source = MemorySource(messages(*ids), wait_seconds=0.01)
                options = {}
                if kind == "suspects":
                    redelivered(source)
                elif kind == "ledger":
                    options["ledger"] = PostgresLedger("billing", engine=engine)
                cut = Cut(used, source, **options)
                was_cut = await cut.cancelled_at(number, monkeypatch)
                applied = {one: count for one, count in business.applied().items() if one.startswith(f"{number}-")}
                assert applied == once([*ids, *(f"{one} too" for one in ids)]), f"cancelled at await {number}"
                assert not [one for one in cut.events if isinstance(one, DatabaseLost)], "it is no outage"
                assert [state for state, _ in connections(engine, named_url)] in ([], ["idle"]), (
                    "no transaction is left"
                )
            return number

    assert asyncio.run(cut_everywhere()) > 10, "a batch has so many awaits"
    assert business.letters() == {}
    assert business.failing() == {}, "a cancelled attempt does not count"
    assert not [one for one in caplog.records if one.levelno > logging.WARNING or "billing failed" in one.getMessage()]
