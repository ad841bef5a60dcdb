"""A function as a publisher."""

import pytest

from txbox import BrokerError
from txbox.relay import FunctionPublisher, OutboxMessage, PartlySent

MESSAGES = [OutboxMessage(f"m-{number}", "own:x", b"") for number in range(4)]


def test_it_is_called_for_each_message() -> None:
    called: list[OutboxMessage] = []
    assert FunctionPublisher(called.append).send(MESSAGES) == []
    assert called == MESSAGES


def test_what_it_raises_refuses_that_message_only() -> None:
    def send(message: OutboxMessage) -> None:
        if message is MESSAGES[1]:
            raise ValueError("not this one")

    [refused] = FunctionPublisher(send).send(MESSAGES)
    assert (refused.message, refused.final) == (MESSAGES[1], False)
    assert "not this one" in refused.error


def test_an_outage_leaves_what_has_not_been_sent() -> None:
    def send(message: OutboxMessage) -> None:
        if message is MESSAGES[0]:
            raise ValueError("not this one")
        if message is MESSAGES[2]:
            raise BrokerError("away")

    with pytest.raises(PartlySent, match="away") as caught:
        FunctionPublisher(send).send(MESSAGES)
    assert caught.value.unsent == tuple(MESSAGES[2:])
    assert [refusal.message for refusal in caught.value.refused] == [MESSAGES[0]]
