"""Handlers of every kind are made idempotent, and what they are given."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine

from support.txbox.idempotent_handlers import KINDS, LONG, MESSAGE, kinds, result_of
from support.txbox.leases import acquired
from txbox import InvalidConfiguration, Message
from txbox.leases import Lease, PostgresLedger, idempotent


def test_a_handler_of_any_kind_runs_once_and_its_result_is_kept(engine: Engine) -> None:
    for kind in KINDS:
        ran: list[Any] = []
        handler = kinds(PostgresLedger(kind, engine=engine), ran)[kind]
        for _ in range(3):
            assert result_of(handler(MESSAGE, greeting="hi")) == {"sent": "hi"}, kind
        assert result_of(handler(message=Message("n", b""), sign=True)) == {"sent": "hello"}
        assert ran == [(MESSAGE, "hi", True), (Message("n", b""), "hello", True)]


def test_the_lease_is_handed_to_a_handler_that_names_it(ledger: PostgresLedger, expire: Callable[[str], None]) -> None:
    seen: list[Lease] = []

    @idempotent(ledger=ledger, lease_seconds=LONG)
    def handler(message: Message, *, lease: Lease) -> None:
        seen.append(lease)
        lease.ensure()

    killed = acquired(ledger, "m")
    expire("m")
    handler(MESSAGE)  # type: ignore[call-arg]
    (lease,) = seen
    assert (lease.subscriber_id, lease.message_id) == ("mailing", "m")
    assert (lease.attempt, lease.unknown_attempts, lease.lease_seconds) == (2, 1, LONG)
    assert lease.fence > killed.fence


def test_what_returns_a_coroutine_without_being_a_coroutine_function_is_refused_and_released(
    ledger: PostgresLedger,
) -> None:
    async def send(message: Message) -> None: ...

    handler = idempotent(lambda message: send(message), ledger=ledger)
    with pytest.raises(InvalidConfiguration, match="so its work is not done"):
        handler(MESSAGE)
    assert acquired(ledger, "m").unknown_attempts == 0


def test_handlers_of_different_messages_may_call_each_other(ledger: PostgresLedger) -> None:
    ran: list[str] = []

    @idempotent(ledger=ledger)
    def handler(message: Message) -> str:
        ran.append(message.id)
        return handler(Message("inner", b"")) + "!" if message.id == "m" else "inner's"

    assert [handler(MESSAGE) for _ in range(2)] == ["inner's!"] * 2
    assert ran == ["m", "inner"]


def test_a_handler_that_would_wait_for_itself_is_told_so(ledger: PostgresLedger) -> None:
    @idempotent(ledger=ledger)
    def handler(message: Message) -> None:
        handler(message)

    with pytest.raises(InvalidConfiguration, match="waits for itself"):
        handler(MESSAGE)
    assert acquired(ledger, "m").attempt == 2, "and it is released"


def test_an_idempotent_handler_may_be_wrapped_in_another_ledgers_leases(engine: Engine) -> None:
    fences: list[int] = []

    @idempotent(ledger=PostgresLedger("outer", engine=engine))
    @idempotent(ledger=PostgresLedger("inner", engine=engine))
    def handler(message: Message, lease: Lease) -> str:
        fences.append(lease.fence)
        return lease.subscriber_id

    assert handler(MESSAGE) == "inner"  # type: ignore[call-arg]
    assert len(fences) == 1
