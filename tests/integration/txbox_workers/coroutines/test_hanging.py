"""What hangs: starts that never end, and handlers that take no notice of their cancellation."""

import asyncio
import signal
import socket
import threading
from typing import Any

import anyio
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from support.waiting import wait_until
from support.workers.async_worker import Engines, apply, make
from support.workers.business import Business, once
from support.workers.memory_worker import messages
from txbox import InvalidConfiguration, Message
from txbox_workers.coroutines import worker as async_worker
from txbox_workers.memory_source import MemorySource

pytestmark = pytest.mark.anyio


class HangingSource(MemorySource):
    """One that opens only when it may."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.opening, self.may_open = threading.Event(), threading.Event()

    def open(self) -> None:
        self.opening.set()
        self.may_open.wait()


def test_a_signal_ends_a_start_whose_database_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = create_async_engine(f"postgresql+psycopg://nobody@127.0.0.1:{silent.getsockname()[1]}/nothing")
        connections: list[socket.socket] = []

        def ask_to_stop() -> None:
            connections.append(silent.accept()[0])
            signal.raise_signal(signal.SIGTERM)

        asked = threading.Thread(target=ask_to_stop)

        async def run() -> None:
            asked.start()
            worker = make(MemorySource(), engine)
            async with asyncio.timeout(10):
                assert await worker.run() is True, "nothing was begun"
            assert not worker.running

        asyncio.run(run())
        asked.join()
        connections[0].close()


async def test_a_signal_ends_a_run_whose_source_never_opens(
    business: Business, async_engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    source = HangingSource(messages("a"))
    asked = threading.Thread(target=lambda: [source.opening.wait(), signal.raise_signal(signal.SIGTERM)])
    asked.start()
    worker = make(source, async_engine)
    running = asyncio.create_task(worker.run(0.2))
    ended, _ = await asyncio.wait([running], timeout=5)
    if not ended:
        source.may_open.set()
    assert ended
    assert running.result() is False
    assert "while starting" in caplog.text
    with pytest.raises(InvalidConfiguration, match="running already"):
        await worker.start()
    source.may_open.set()
    await asyncio.to_thread(
        wait_until, lambda: not [one for one in threading.enumerate() if one.name.startswith("txbox-start")]
    )
    assert await worker.stop(20) is True, "what it has started since has ended"
    assert business.applied() == once("")
    async with worker:
        assert await asyncio.to_thread(source.wait_until_empty, 30), "another start works"
    asked.join()


def test_a_start_that_is_cancelled_waits_for_its_source_no_longer_than_a_while(
    make_async_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_worker, "CANCEL_SECONDS", 0.2)
    source = HangingSource()

    async def run() -> None:
        async with make_async_engine() as engine:
            worker = make(source, engine)
            starting = asyncio.create_task(worker.run())
            await asyncio.to_thread(source.opening.wait)
            starting.cancel()
            ended, _ = await asyncio.wait([starting], timeout=5)
            source.may_open.set()
            assert ended
            assert not worker.running

    asyncio.run(run())
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("txbox-start")])


async def test_a_start_that_is_cancelled_again_and_again_has_ended_when_run_has(
    business: Business, async_engine: AsyncEngine
) -> None:
    source = HangingSource(messages("a"))
    worker = make(source, async_engine)
    loop = asyncio.get_running_loop()

    def cancel_as_it_opens() -> None:
        source.opening.wait(60)
        loop.call_soon_threadsafe(scope.cancel)
        threading.Timer(0.4, source.may_open.set).start()

    threading.Thread(target=cancel_as_it_opens).start()
    with anyio.CancelScope() as scope:  # it cancels in each turn of the loop
        await worker.run()
    assert source.may_open.is_set()
    assert not worker.running
    assert not [one for one in threading.enumerate() if one.name == "txbox-start"]
    assert business.applied() == once("")


async def test_a_handler_that_swallows_its_cancellation_is_named(
    business: Business, async_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(async_worker, "CANCEL_SECONDS", 0.2)
    begun, go = asyncio.Event(), asyncio.Event()

    async def handle(session: Any, message: Message) -> None:
        begun.set()
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue
        await apply(session, message)

    source = MemorySource(messages("deaf"))
    worker = make(source, async_engine, handle)
    running = asyncio.create_task(worker.run())
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    was_running, said = worker.running, caplog.text
    go.set()
    assert await worker.stop(20) is True
    assert was_running
    assert "handlers of these messages have not ended: deaf;" in said
    assert business.applied() == once(["deaf"]), "what it does is committed all the same"
