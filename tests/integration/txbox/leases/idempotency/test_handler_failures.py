"""Failures of idempotent handlers: the message is free, and the error goes on."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from support.txbox.idempotent_handlers import MESSAGE
from support.txbox.leases import acquired
from txbox import EffectUnknown, LeaseLost, Message
from txbox.leases import Lease, LeaseState, PostgresLedger, idempotent

FAILURES = [ValueError("no"), KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError(), GeneratorExit()]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("failure", FAILURES, ids=repr)
def test_a_handler_that_fails_leaves_the_message_free_and_its_error_goes_on(
    ledger: PostgresLedger, failure: BaseException, is_async: bool
) -> None:
    leases: list[Lease] = []

    def handler(message: Message, lease: Lease) -> str:
        leases.append(lease)
        if len(leases) == 1:
            raise failure
        return "sent"

    async def handler_async(message: Message, lease: Lease) -> str:
        return handler(message, lease)

    decorated: Any = idempotent(handler_async if is_async else handler, ledger=ledger)

    def call() -> Any:
        if not is_async:
            return decorated(MESSAGE)
        # By hand: asyncio.run has opinions of its own on most of these.
        coroutine = decorated(MESSAGE)
        loop = asyncio.new_event_loop()
        try:
            task = loop.create_task(coroutine)
            loop.run_until_complete(asyncio.wait([task]))
            return task.result()
        except (KeyboardInterrupt, SystemExit):
            assert task.exception() is failure
            raise
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    with pytest.raises(type(failure)):
        call()
    assert call() == "sent"
    # One that was interrupted may have come anywhere.
    unknown = 0 if isinstance(failure, Exception) else 1
    assert [(lease.attempt, lease.unknown_attempts) for lease in leases] == [(1, 0), (2, unknown)]
    assert leases[1].fence > leases[0].fence


def test_a_handler_that_cannot_know_says_so_and_the_next_attempt_is_told(ledger: PostgresLedger) -> None:
    seen = []

    @idempotent(ledger=ledger)
    def mail(message: Message, lease: Lease | None = None) -> None:
        assert lease is not None
        seen.append((lease.attempt, lease.unknown_attempts))
        if lease.attempt == 1:
            raise EffectUnknown("the server hung up")
        if lease.attempt == 2:
            raise ValueError("refused")

    for expected in (EffectUnknown, ValueError):
        with pytest.raises(expected):
            mail(Message("m", b""))
    mail(Message("m", b""))
    assert seen == [(1, 0), (2, 1), (3, 1)]


def test_a_stop_iteration_of_a_handler_is_no_end_of_ours(ledger: PostgresLedger) -> None:
    def handler(message: Message) -> None:
        next(iter(()))

    with pytest.raises((StopIteration, RuntimeError)):
        idempotent(handler, ledger=ledger)(MESSAGE)
    assert acquired(ledger, "m").unknown_attempts == 0


def test_work_that_was_taken_over_is_told_so_and_the_others_result_stays(
    ledger: PostgresLedger, expire: Callable[[str], None]
) -> None:
    def handler(message: Message) -> str:
        expire("m")
        ledger.complete(acquired(ledger, "m"), b'"theirs"')
        return "mine"

    decorated = idempotent(handler, ledger=ledger)
    with pytest.raises(LeaseLost):
        decorated(MESSAGE)
    assert decorated(MESSAGE) == "theirs"


def test_a_handler_that_fails_when_its_work_was_taken_over_fails_and_nothing_else(
    ledger: PostgresLedger, expire: Callable[[str], None]
) -> None:
    def handler(message: Message) -> str:
        expire("m")
        acquired(ledger, "m")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        idempotent(handler, ledger=ledger)(MESSAGE)
    assert ledger.acquire("m").state is LeaseState.IN_FLIGHT, "the other one's lease is not released"
