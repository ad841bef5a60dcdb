"""Handlers of every kind are made idempotent: what they are given, their message ids, and their results."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine

from support.txbox.idempotent_handlers import KINDS, LONG, MESSAGE, kinds, result_of
from support.txbox.leases import acquired
from txbox import InvalidConfiguration, Message, Mismatch, ResultNotStored
from txbox.leases import Lease, LeaseState, PostgresLedger, idempotent


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


# --- message ids and fingerprints -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fingerprint", "same", "other"),
    [
        (True, Message("m", MESSAGE.body, {"a": "b"}), Message("m", b"other")),
        (lambda message: message.headers.get("to", ""), Message("m", b"other"), Message("m", b"", {"to": "bob"})),
    ],
    ids=["True", "a function"],
)
def test_another_payload_under_the_same_id_is_refused(
    ledger: PostgresLedger, fingerprint: Any, same: Message, other: Message
) -> None:
    handler = idempotent(lambda message: "sent", ledger=ledger, fingerprint=fingerprint)
    assert handler(MESSAGE) == "sent"
    assert handler(same) == "sent"
    with pytest.raises(Mismatch) as caught:
        handler(other)
    assert caught.value.message_ids == ("m",)


def test_without_a_fingerprint_the_id_decides(ledger: PostgresLedger) -> None:
    handler = idempotent(lambda message: message.text, ledger=ledger)
    assert [handler(MESSAGE), handler(Message("m", b"other"))] == [MESSAGE.text] * 2


def test_the_id_may_be_anything_that_the_arguments_say(ledger: PostgresLedger) -> None:
    @idempotent(
        ledger=ledger,
        identify=lambda order, *, to: f"{order['id']}/{to}",
        fingerprint=lambda order, *, to: json.dumps(order),
    )
    def send(order: dict[str, Any], *, to: str) -> str:
        return f"{order['id']} to {to}"

    assert send({"id": 1}, to="ann") == "1 to ann"
    assert send({"id": 1}, to="bob") == "1 to bob"
    with pytest.raises(Mismatch):
        send({"id": 1, "rush": True}, to="ann")
    assert ledger.acquire("1/ann").state is LeaseState.COMPLETED


# --- results ---------------------------------------------------------------------------------------------------------


def test_a_result_of_json_comes_back_as_it_was(ledger: PostgresLedger) -> None:
    results: list[Any] = [None, True, 0, "größe", [1, None, {"a": 1.5}], {}]
    handler = idempotent(lambda message: results[int(message.id)], ledger=ledger)
    for number, result in enumerate(results):
        assert [handler(Message(str(number), b"")) for _ in range(3)] == [result] * 3


def test_a_result_may_be_encoded_in_any_way(ledger: PostgresLedger) -> None:
    handler = idempotent(
        lambda message: {1, 2},
        ledger=ledger,
        encode=lambda result: ",".join(map(str, sorted(result))),
        decode=lambda encoded: {int(number) for number in encoded.decode().split(",")},
    )
    assert [handler(MESSAGE) for _ in range(2)] == [{1, 2}] * 2
    assert ledger.acquire("m").result == b"1,2"


def test_a_result_need_not_be_kept(ledger: PostgresLedger) -> None:
    handler = idempotent(lambda message: object(), ledger=ledger, keep_result=False)
    assert handler(MESSAGE) is not None
    assert handler(MESSAGE) is None


def test_a_result_that_cannot_be_kept_is_told_and_the_message_is_completed(ledger: PostgresLedger) -> None:
    results: list[Any] = [object(), {1}, float("nan"), b"bytes", "\ud800"]
    runs = []

    def handler(message: Message) -> Any:
        runs.append(message.id)
        return results[int(message.id)]

    decorated = idempotent(handler, ledger=ledger)
    messages = [Message(str(number), b"") for number in range(len(results))]
    for message in messages:
        with pytest.raises(ResultNotStored, match=f"mailing has completed {message.id}") as caught:
            decorated(message)
        assert caught.value.message_id == message.id
        assert caught.value.__cause__ is not None
        assert decorated(message) is None
    assert runs == [message.id for message in messages]
