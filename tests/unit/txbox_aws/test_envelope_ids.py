"""The id of a message that came in an envelope: chosen, useless, derived."""

from typing import Any

import pytest

from support.aws.envelopes import BROKER_ID, PURCHASE, SNS_NOTIFICATION, opened, readable, received
from support.aws.queues import QUEUE, attribute
from txbox import InvalidMessageId, MalformedMessage, Message
from txbox_aws.envelopes import open_envelope


def test_identify_is_given_the_message_without_its_wrappers() -> None:
    seen: list[Message] = []

    def by_account(message: Message) -> str:
        seen.append(message)
        return str(message.json()["account"])

    delivery = open_envelope(received(SNS_NOTIFICATION), QUEUE, identify=by_account)
    assert delivery.message.id == "a-1"
    assert (seen[0].id, seen[0].body, seen[0].source) == (BROKER_ID, PURCHASE.encode(), QUEUE)


def test_an_identify_that_raises_makes_its_message_malformed() -> None:
    delivery = open_envelope(received(PURCHASE), QUEUE, identify=lambda message: str(message.json()["no such key"]))
    assert isinstance(delivery.problem, MalformedMessage)
    assert str(delivery.problem) == "the message's id could not be read: KeyError: 'no such key'"
    assert isinstance(delivery.problem.__cause__, KeyError)
    assert delivery.message.id == BROKER_ID


@pytest.mark.parametrize("not_text", [None, 7, b"id"])
def test_an_identify_that_returns_no_text_makes_its_message_malformed(not_text: Any) -> None:
    delivery = open_envelope(received(PURCHASE), QUEUE, identify=lambda message: not_text)
    assert isinstance(delivery.problem, MalformedMessage)
    assert "TypeError: a message id is a string" in str(delivery.problem)


@pytest.mark.parametrize("useless", ["", "a\0b", "x" * 1_001, "\ud800"], ids=["empty", "NUL", "long", "surrogate"])
def test_an_id_that_the_inbox_cannot_keep_is_a_problem_of_the_message(useless: str) -> None:
    delivery = open_envelope(received(PURCHASE), QUEUE, identify=lambda message: useless)
    assert isinstance(delivery.problem, InvalidMessageId)
    assert delivery.message.id == BROKER_ID


def test_a_message_id_that_is_too_long_is_not_cut() -> None:
    delivery = opened(PURCHASE, attributes={"message-id": attribute("x" * 1_001)})
    assert isinstance(delivery.problem, InvalidMessageId)


def test_a_fifo_deduplication_id_is_an_id_within_its_group() -> None:
    message = readable(PURCHASE, system={"MessageDeduplicationId": "purchase-1", "MessageGroupId": "a-1"})
    assert message.id == "a-1 purchase-1"


def test_the_deduplication_id_that_a_redrive_has_kept_counts() -> None:
    system = {"MessageDeduplicationId": "redrive-7-1", "MessageGroupId": "a-1"}
    attributes = {"sqs-deduplication-id": attribute("purchase-1"), "first-delivery-id": attribute("m-0")}
    assert readable(PURCHASE, system=system, attributes=attributes).id == "a-1 purchase-1"
    assert readable(PURCHASE, attributes={"first-delivery-id": attribute("m-0")}).id == "m-0"
