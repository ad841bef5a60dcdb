"""Redrive: the message that a dead letter becomes again."""

import base64
from typing import Any

import pytest

from support.aws.queues import QUEUE, attribute
from support.aws.scripted_sqs import ScriptedSqs, error
from txbox import BrokerError, DeadLetter, Reason
from txbox_aws.sqs import redrive_to_queue
from txbox_aws.sqs.queues import MAX_ATTRIBUTES


def letter(attributes: dict[str, Any] | None = None, system: dict[str, str] | None = None, **more: Any) -> DeadLetter:
    return DeadLetter(
        **{
            "subscriber_id": "billing",
            "message_id": "m-1",
            "reason": Reason.FAILED,
            "error": "no",
            "attempts": 5,
            "source": QUEUE,
            "body": "Zoë".encode(),
            "envelope": {"attributes": attributes or {}, "system": system or {}},
            "dead_letter_id": 7,
            **more,
        }
    )


def redriven(broker: ScriptedSqs, client: Any, parked: DeadLetter, **more: Any) -> dict[str, Any]:
    broker.answer = lambda action, request: {"MessageId": "new"}
    redrive_to_queue(parked, client=client, **more)
    (request,) = broker.requests("SendMessage")
    return request


def test_a_letter_goes_back_whole_under_the_id_that_it_had(broker: ScriptedSqs, client: Any) -> None:
    parked = letter(
        {"Tenant": attribute("t-1"), "Blob": {"DataType": "Binary", "BinaryValue": base64.b64encode(b"\0\1").decode()}}
    )
    assert redriven(broker, client, parked) == {
        "QueueUrl": QUEUE,
        "MessageBody": "Zoë",
        "MessageAttributes": {
            "Tenant": attribute("t-1"),
            "Blob": {"DataType": "Binary", "BinaryValue": base64.b64encode(b"\0\1").decode()},
            "message-id": attribute("m-1"),
        },
    }


@pytest.mark.parametrize("name", ["message-id", "Message-Id"])
def test_an_id_that_the_producer_gave_is_kept(broker: ScriptedSqs, client: Any, name: str) -> None:
    request = redriven(broker, client, letter({name: attribute("m-1")}))
    assert request["MessageAttributes"] == {name: attribute("m-1")}


def test_a_letter_can_go_to_another_queue(broker: ScriptedSqs, client: Any) -> None:
    assert redriven(broker, client, letter(), queue_url=f"{QUEUE}-2")["QueueUrl"] == f"{QUEUE}-2"


def test_the_id_takes_the_tenth_attribute(broker: ScriptedSqs, client: Any) -> None:
    nine = {f"a-{number}": attribute("x") for number in range(MAX_ATTRIBUTES - 1)}
    assert len(redriven(broker, client, letter(nine))["MessageAttributes"]) == MAX_ATTRIBUTES


def test_a_letter_whose_id_has_no_room_is_not_sent_under_another_id(broker: ScriptedSqs, client: Any) -> None:
    ten = {f"a-{number}": attribute("x") for number in range(MAX_ATTRIBUTES)}
    with pytest.raises(BrokerError, match="message m-1 has 10 attributes already") as caught:
        redrive_to_queue(letter(ten), client=client)
    assert caught.value.permanent
    assert broker.calls == []


def test_ten_attributes_are_no_hindrance_if_the_id_is_among_them(broker: ScriptedSqs, client: Any) -> None:
    ten = {"message-id": attribute("m-1"), **{f"a-{number}": attribute("x") for number in range(MAX_ATTRIBUTES - 1)}}
    assert redriven(broker, client, letter(ten))["MessageAttributes"] == ten


def test_a_fifo_letter_keeps_its_group_and_gets_a_new_deduplication_id(broker: ScriptedSqs, client: Any) -> None:
    parked = letter(system={"MessageGroupId": "a-1", "MessageDeduplicationId": "old"}, source=f"{QUEUE}.fifo")
    broker.answer = lambda action, request: {"MessageId": "new"}
    for _ in range(2):
        redrive_to_queue(parked, client=client)
    first, second = broker.requests("SendMessage")
    assert first["MessageGroupId"] == second["MessageGroupId"] == "a-1"
    assert len({"old", first["MessageDeduplicationId"], second["MessageDeduplicationId"]}) == 3


def test_a_fifo_letter_without_a_group_gets_one_that_sqs_accepts(broker: ScriptedSqs, client: Any) -> None:
    parked = letter(message_id="/orders with a blank", source=f"{QUEUE}.fifo")
    assert redriven(broker, client, parked)["MessageGroupId"] == "redrive-7"


def test_a_standard_queue_keeps_its_groups_and_knows_no_deduplication(broker: ScriptedSqs, client: Any) -> None:
    parked = letter(system={"MessageGroupId": "tenant-1", "MessageDeduplicationId": "old"})
    request = redriven(broker, client, parked)
    assert request["MessageGroupId"] == "tenant-1"
    assert "MessageDeduplicationId" not in request


KEYED = {"order_key": "ann", "headers": {"key": "ann"}, "attributes": {"key": attribute("ann")}}
GROUPED = {"order_key": "ann", "source": f"{QUEUE}.fifo", "system": {"MessageGroupId": "ann"}}


@pytest.mark.parametrize(
    ("parked", "target", "group", "header"),
    [
        (KEYED, f"{QUEUE}.fifo", "ann", "ann"),
        (GROUPED, QUEUE, None, "ann"),
        (GROUPED, f"{QUEUE}-2.fifo", "ann", None),
        ({**GROUPED, "order_key": None}, QUEUE, None, None),
    ],
)
def test_an_order_goes_along_to_another_kind_of_queue(
    broker: ScriptedSqs, client: Any, parked: dict[str, Any], target: str, group: str | None, header: str | None
) -> None:
    request = redriven(broker, client, letter(**parked), queue_url=target)
    assert request.get("MessageGroupId") == group
    assert request["MessageAttributes"].get("key") == (attribute(header) if header else None)


@pytest.mark.parametrize(
    ("parked", "target", "why"),
    [
        ({**KEYED, "order_key": "Zoë"}, f"{QUEUE}.fifo", "its key 'Zoë' cannot be a group"),
        ({**GROUPED, "headers": {"key": "bob"}}, QUEUE, "it would keep that of its header key, 'bob'; send it to a FI"),
    ],
)
def test_an_order_that_cannot_go_along_is_not_given_up(
    broker: ScriptedSqs, client: Any, parked: dict[str, Any], target: str, why: str
) -> None:
    with pytest.raises(BrokerError, match=why):
        redrive_to_queue(letter(**parked), client=client, queue_url=target)
    assert broker.calls == []


def test_the_makeshift_id_of_a_malformed_letter_stays_behind(broker: ScriptedSqs, client: Any) -> None:
    # Once it can be read, the id that it carries inside is to count; failing that, the one of its first delivery.
    parked = letter(reason=Reason.MALFORMED, source=f"{QUEUE}.fifo", system={"MessageDeduplicationId": "order-17"})
    assert redriven(broker, client, parked)["MessageAttributes"] == {
        "first-delivery-id": attribute("m-1"),
        "sqs-deduplication-id": attribute("order-17"),
    }


def test_a_redrive_that_is_refused_is_an_error(broker: ScriptedSqs, client: Any) -> None:
    broker.answer = lambda action, request: error("QueueDoesNotExist")
    with pytest.raises(BrokerError, match=f"SQS refused SendMessage on {QUEUE}") as caught:
        redrive_to_queue(letter(), client=client)
    assert caught.value.permanent
