"""The event loop of async publishers ends in bounded time, whatever their coroutines make of their cancellation."""

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest
from sqlalchemy import Engine

from integration.txbox.conftest import Left
from integration.txbox.relay.conftest import StartBoth
from support.txbox.outbox import publish
from support.txbox.publishers import AsyncRecorder
from support.waiting import wait_until
from txbox import Outgoing
from txbox.relay import OutboxMessage, Relay, async_publishers


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_publishers, "END_SECONDS", 0.3)
    monkeypatch.setattr(async_publishers, "LEAVE_SECONDS", 0.3)


async def ignore_cancellation(freed: threading.Event) -> None:
    while not freed.is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize("end", [SystemExit(1), KeyboardInterrupt()], ids=repr)
def test_a_loop_that_a_publisher_ends_begins_again_though_another_ignores_its_cancellation(
    engine: Engine,
    start_both: StartBoth,
    freed: threading.Event,
    left: Left,
    caplog: pytest.LogCaptureFixture,
    end: BaseException,
) -> None:
    deaf = threading.Event()

    async def raise_it() -> None:
        raise end

    async def wait(messages: Sequence[OutboxMessage]) -> None:
        if len(far.lives) > 1:
            return
        if messages[0].destination == "far:deaf":
            deaf.set()
            await ignore_cancellation(freed)
            ran_on.append(True)
        while not deaf.is_set():
            await asyncio.sleep(0.01)
        await asyncio.create_task(raise_it())

    ran_on: list[bool] = []
    far = AsyncRecorder(wait)
    [deaf_id, _] = publish(engine, Outgoing("far:deaf", "deaf", key="a"), Outgoing("far:ends", "ends"))
    relay = start_both(far)
    wait_until(lambda: left() == [], "an empty outbox", timeout=20)
    assert sorted(far.bodies) == ["deaf", "ends"]
    assert far.lives == ["entered", "left", "entered"]
    [line] = [record.getMessage() for record in caplog.records if "left where they are" in record.getMessage()]
    assert f"a call of the publisher for far:deaf, of 1 messages from {deaf_id} on" in line
    freed.set()
    assert relay.stop(10)
    assert ran_on == []


class Unwilling(AsyncRecorder):
    """Does not end its ``__aenter__``, or its ``__aexit__``, whether it is cancelled or not."""

    def __init__(self, method: str, freed: threading.Event, *, deaf: bool) -> None:
        super().__init__()
        self._method, self._freed, self._deaf = method, freed, deaf
        self.begun = threading.Event()

    async def __aenter__(self) -> None:
        await super().__aenter__()
        await self._hang("__aenter__")

    async def __aexit__(self, *_: object) -> None:
        await self._hang("__aexit__")

    async def _hang(self, method: str) -> None:
        if method == self._method:
            self.begun.set()
            await (ignore_cancellation(self._freed) if self._deaf else asyncio.sleep(600))


@pytest.mark.parametrize(("method", "deaf"), [("__aexit__", False), ("__aexit__", True), ("__aenter__", True)], ids=str)
def test_a_publisher_that_does_not_end_its_entry_or_exit_costs_a_stop_a_bounded_time(
    engine: Engine, freed: threading.Event, caplog: pytest.LogCaptureFixture, method: str, deaf: bool
) -> None:
    far = Unwilling(method, freed, deaf=deaf)
    relay = Relay(engine, {"far": far})
    relay.start()
    wait_until(lambda: far.lives, "it is entered")
    began = time.monotonic()
    assert relay.stop(20)
    assert time.monotonic() - began < 5
    assert far.begun.is_set()
    said = [record.getMessage() for record in caplog.records if record.name == "txbox.relay"]
    assert f"{method} of publisher Unwilling has not ended within 0.3 s of the stop" in said
    assert sum("left where they are" in line and f"{method} of publisher Unwilling" in line for line in said) == deaf
