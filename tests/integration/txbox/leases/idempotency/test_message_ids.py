"""Message ids of idempotent handlers, and fingerprints of what comes under them."""

import json
from typing import Any

import pytest

from support.txbox.idempotent_handlers import MESSAGE
from txbox import Message, Mismatch
from txbox.leases import LeaseState, PostgresLedger, idempotent


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
