"""Messages in flight: who comes second waits, or is told so."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine

from support.txbox.idempotent_handlers import LONG, MESSAGE, kinds, result_of
from support.txbox.leases import acquired
from txbox import InFlight, Message
from txbox.leases import LEASE_SECONDS, Acquisition, Lease, LeaseState, PostgresLedger, idempotent


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_what_is_in_flight_is_told_so_at_once(ledger: PostgresLedger, is_async: bool) -> None:
    acquired(ledger, "m", lease_seconds=LONG)
    handler = kinds(ledger, [])["coroutine function" if is_async else "function"]
    with pytest.raises(InFlight) as caught:
        result_of(handler(MESSAGE))
    assert caught.value.message_ids == ("m",)
    assert caught.value.seconds is not None
    assert LONG - 30 < caught.value.seconds <= LONG


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("end", ["completed", "released", "died", "neither"])
def test_whoever_waits_gets_the_others_result_or_takes_over(
    ledger: PostgresLedger, expire: Callable[[str], None], is_async: bool, end: str
) -> None:
    unknown: list[int] = []

    def handler(message: Message, lease: Lease) -> str:
        unknown.append(lease.unknown_attempts)
        return "mine"

    async def handler_async(message: Message, lease: Lease) -> str:
        return handler(message, lease)

    lease = acquired(ledger, "m", lease_seconds=LONG)
    asked = threading.Event()

    class Observed(PostgresLedger):
        def acquire(
            self, message_id: str, *, lease_seconds: float = LEASE_SECONDS, fingerprint: bytes | None = None
        ) -> Acquisition:
            acquisition = super().acquire(message_id, lease_seconds=lease_seconds, fingerprint=fingerprint)
            if acquisition.state is LeaseState.IN_FLIGHT:
                asked.set()
            return acquisition

    observed = Observed("mailing", engine=ledger._engine)
    wait = 0.3 if end == "neither" else 30.0
    decorated: Any = idempotent(handler_async if is_async else handler, ledger=observed, wait_seconds=wait)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: result_of(decorated(MESSAGE)))
        assert asked.wait(20)
        match end:
            case "completed":
                ledger.complete(lease, b'"theirs"')
            case "released":
                ledger.release(lease)
            case "died":
                expire("m")
            case "neither":
                with pytest.raises(InFlight):
                    waiting.result(20)
                return
        assert waiting.result(20) == ("theirs" if end == "completed" else "mine")
    assert unknown == {"completed": [], "released": [0], "died": [1]}[end]


def test_of_32_threads_with_one_message_one_runs_it_and_all_have_its_result(engine: Engine) -> None:
    gate = threading.Barrier(32)
    runs: list[int] = []

    @idempotent(ledger=PostgresLedger("mailing", engine=engine), wait_seconds=60)
    def handler(message: Message) -> int:
        runs.append(threading.get_ident())
        return threading.get_ident()

    def call(_: int) -> int:
        gate.wait()
        return handler(MESSAGE)

    with ThreadPoolExecutor(32) as pool:
        results = set(pool.map(call, range(32)))
    assert len(runs) == 1
    assert results == set(runs)


def test_of_32_tasks_with_one_message_one_runs_it_and_all_have_its_result(ledger: PostgresLedger) -> None:
    runs: list[str] = []

    @idempotent(ledger=ledger, wait_seconds=60)
    async def handler(message: Message) -> str:
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        runs.append(task.get_name())
        return task.get_name()

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(handler(MESSAGE) for _ in range(32)))

    results = asyncio.run(all_at_once())
    assert len(results) == 32
    assert set(results) == set(runs)
    assert len(runs) == 1
