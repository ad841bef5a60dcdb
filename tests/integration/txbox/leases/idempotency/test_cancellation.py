"""What becomes of a message when the task that works on it is cancelled."""

import asyncio
import threading

import pytest
from sqlalchemy import Engine

from support.postgres.tcp_proxy import TcpProxy
from support.txbox.leases import acquired
from txbox import Message
from txbox.leases import LEASE_SECONDS, Acquisition, Lease, LeaseState, PostgresLedger, idempotent
from txbox.leases.lease import AttemptEnd

MESSAGE = Message("m", b"")


class SlowLedger(PostgresLedger):
    """A ledger that says when it has been called, and answers when it may."""

    def __init__(self, engine: Engine, slow: str) -> None:
        super().__init__("mailing", engine=engine)
        self.slow = slow
        self.called = threading.Event()
        self.may_answer = threading.Event()

    def acquire(
        self, message_id: str, *, lease_seconds: float = LEASE_SECONDS, fingerprint: bytes | None = None
    ) -> Acquisition:
        answer = super().acquire(message_id, lease_seconds=lease_seconds, fingerprint=fingerprint)
        self._wait("acquire")
        return answer

    def complete(self, lease: Lease, result: bytes | None = None) -> None:
        self._wait("complete")
        super().complete(lease, result)

    def release(self, lease: Lease, ended: AttemptEnd = AttemptEnd.FAILED, *, forget_attempts: bool = False) -> None:
        self._wait("release")
        super().release(lease, ended, forget_attempts=forget_attempts)

    def _wait(self, step: str) -> None:
        if step == self.slow:
            self.called.set()
            assert self.may_answer.wait(20)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("step", ["acquire", "complete", "release"])
def test_a_task_that_is_cancelled_ends_cancelled_and_leaves_no_lease_behind(
    engine: Engine, ledger: PostgresLedger, step: str, times: int
) -> None:
    slow = SlowLedger(engine, step)
    runs: list[str] = []

    @idempotent(ledger=slow)
    async def handler(message: Message) -> str:
        runs.append(message.id)
        if step == "release":
            raise ZeroDivisionError
        return "sent"

    async def story() -> None:
        task = asyncio.create_task(handler(MESSAGE))
        await asyncio.to_thread(slow.called.wait, 20)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done(), "the ledger is being told"
        slow.may_answer.set()
        await asyncio.wait([task])
        assert task.cancelled(), "who cancels a task relies on its end"

    asyncio.run(story())
    after = ledger.acquire("m")
    if step == "complete":
        assert (after.state, after.result) == (LeaseState.COMPLETED, b'"sent"')
    else:
        assert after.state is LeaseState.ACQUIRED
        assert after.lease is not None
        assert after.lease.unknown_attempts == 0
    assert runs == ([] if step == "acquire" else ["m"])


def test_a_task_that_is_cancelled_at_its_work_leaves_the_message_free(ledger: PostgresLedger) -> None:
    async def story() -> None:
        began = asyncio.Event()

        @idempotent(ledger=ledger)
        async def handler(message: Message) -> None:
            began.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(handler(MESSAGE))
        await began.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(story())
    assert acquired(ledger, "m").unknown_attempts == 1, "nobody knows how far it had come"


def test_a_cancellation_is_not_forgotten_while_the_store_is_away(
    remote: PostgresLedger, proxy: TcpProxy, ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completion that fails was called when the task was cancelled."""
    failing, may_fail = threading.Event(), threading.Event()
    complete = remote.complete

    def slow_complete(lease: Lease, result: bytes | None = None) -> None:
        first = not failing.is_set()
        failing.set()
        assert may_fail.wait(20)
        try:
            complete(lease, result)
        finally:
            if first:
                proxy.accept()

    monkeypatch.setattr(remote, "complete", slow_complete)

    @idempotent(ledger=remote)
    async def handler(message: Message) -> str:
        proxy.refuse()
        proxy.cut()
        return "sent"

    async def story() -> None:
        task = asyncio.create_task(handler(MESSAGE))
        await asyncio.to_thread(failing.wait, 20)
        task.cancel()
        await asyncio.sleep(0)
        may_fail.set()
        await asyncio.wait([task])
        assert task.cancelled(), "a loop around it would go on for ever"

    asyncio.run(story())
