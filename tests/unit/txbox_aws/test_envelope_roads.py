"""Every road from an outbox to a worker: what was published comes out, byte for byte, under its own id."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from support.aws.envelopes import CLOUDEVENT, EVENTBRIDGE_EVENT, PURCHASE, SNS_NOTIFICATION, opened, readable
from support.aws.outgoing import BUS, QUEUE, TOPIC
from support.aws.queues import attribute
from txbox import MalformedMessage, Message, NotSendable
from txbox.messages.destinations import require_sendable
from txbox.relay import OutboxMessage
from txbox_aws.envelopes import Envelope
from txbox_aws.publishers import EventBridgePublisher, SnsPublisher, SqsPublisher

SQS, SNS, EVENTBRIDGE = SqsPublisher(), SnsPublisher(), EventBridgePublisher()
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def over_sqs(message: OutboxMessage) -> Message:
    parameters = SQS._entry(message).parameters
    return readable(parameters["MessageBody"], attributes=parameters["MessageAttributes"])


def over_sns_raw(message: OutboxMessage) -> Message:
    parameters = SNS._entry(message).parameters
    return readable(parameters["Message"], attributes=parameters["MessageAttributes"])


def over_sns(message: OutboxMessage) -> Message:
    parameters = SNS._entry(message).parameters
    attributes = {
        name: {"Type": value["DataType"], "Value": value["StringValue"]}
        for name, value in parameters["MessageAttributes"].items()
    }
    return readable({**SNS_NOTIFICATION, "Message": parameters["Message"], "MessageAttributes": attributes})


def event(message: OutboxMessage) -> dict[str, Any]:
    """The event that EventBridge makes of it: parsed, and written again."""
    parameters = EVENTBRIDGE._entry(message).parameters
    return {
        **EVENTBRIDGE_EVENT,
        "source": parameters["Source"],
        "detail-type": parameters["DetailType"],
        "resources": parameters["Resources"],
        "detail": json.loads(parameters["Detail"]),
    }


def over_eventbridge(message: OutboxMessage) -> Message:
    return readable(event(message))


def over_eventbridge_and_sns(message: OutboxMessage) -> Message:
    return readable({**SNS_NOTIFICATION, "Message": json.dumps(event(message), separators=(",", ":"))})


Road = Callable[[OutboxMessage], Message]
TEXT_ROADS: dict[Road, str] = {over_sqs: QUEUE, over_sns_raw: TOPIC, over_sns: TOPIC}
EVENT_ROADS: dict[Road, str] = {over_eventbridge: BUS, over_eventbridge_and_sns: BUS}
ROADS = {**TEXT_ROADS, **EVENT_ROADS}

wrappers = st.sampled_from([SNS_NOTIFICATION, EVENTBRIDGE_EVENT, CLOUDEVENT]).map(json.dumps).map(str.encode)
objects = st.dictionaries(st.text(), st.none() | st.integers(-9, 9) | st.text(), max_size=3)
events = st.builds(lambda value, ascii_: json.dumps(value, ensure_ascii=ascii_).encode(), objects, st.booleans())
names = st.from_regex(r"[a-z][a-z0-9_-]{0,20}", fullmatch=True).filter(
    lambda name: name != "message-id" and not name.startswith(("txbox-", "ce_", "cloudevents_", "sns-", "eventbridge-"))
)
header_values = st.text()
message_ids = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=200)


def travel(roads: dict[Road, str], body: bytes, headers: dict[str, str], message_id: str) -> None:
    for road, destination in roads.items():
        try:
            require_sendable(destination, body, key=None, headers=headers, message_id=message_id)
        except NotSendable:
            assume(False)
        received = road(OutboxMessage(message_id, destination, body, headers=headers))
        assert (received.id, received.body) == (message_id, body), road
        assert headers.items() <= received.headers.items(), road
        assert "txbox-body" not in received.headers, road


@given(
    body=st.binary() | st.text().map(str.encode) | wrappers | events,
    headers=st.dictionaries(names, header_values, max_size=8),
    message_id=message_ids,
)
@example(body=b"", headers={}, message_id="m-1")
@example(body=b'{"a":' * 100_000, headers={"traceparent": TRACEPARENT}, message_id="m-1")
@example(body=b"\xef\xbb\xbf{}", headers={"sqs-deduplication-id": "d", "sqs-group-id": "g"}, message_id="m-1")
def test_any_body_and_any_headers_over_sqs_and_sns(body: bytes, headers: dict[str, str], message_id: str) -> None:
    travel(TEXT_ROADS, body, headers, message_id)


@given(body=events | wrappers, headers=st.dictionaries(names, header_values, max_size=12), message_id=message_ids)
@example(body=b' {"a" : 1.10}\n', headers={"traceparent": TRACEPARENT, "source": "s"}, message_id="m-1")
def test_any_event_and_any_headers_over_eventbridge(body: bytes, headers: dict[str, str], message_id: str) -> None:
    travel(EVENT_ROADS, body, headers, message_id)


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
@pytest.mark.parametrize("wrapper", [SNS_NOTIFICATION, EVENTBRIDGE_EVENT, CLOUDEVENT], ids=["sns", "event", "cloud"])
def test_a_body_that_looks_like_a_wrapper_is_not_taken_off(road: Road, wrapper: dict[str, Any]) -> None:
    body = json.dumps(wrapper).encode()
    received = road(OutboxMessage("m-1", ROADS[road], body))
    assert (received.id, received.body) == ("m-1", body)


def test_the_key_of_an_event_arrives() -> None:
    headers = over_eventbridge(OutboxMessage("m-1", BUS, b"{}", key="a 1")).headers
    assert headers["eventbridge-key"] == "a 1"
    assert "eventbridge-key" not in over_eventbridge(OutboxMessage("m-1", BUS, b"{}")).headers


# --- the mark, and what it does not do -------------------------------------------------------------------------------


def marked(encoding: str) -> dict[str, Any]:
    return {"message-id": attribute("m-1"), "txbox-body": attribute(encoding)}


def test_an_id_of_its_own_does_not_keep_a_wrapper_on() -> None:
    # A redrive gives a message its id as an attribute, and leaves it in its wrapper.
    message = readable(SNS_NOTIFICATION, attributes={"message-id": attribute("m-1")})
    assert (message.id, message.body) == ("m-1", PURCHASE.encode())


def test_who_asks_for_the_data_of_a_cloudevent_gets_it_from_an_outbox_too() -> None:
    message = readable(CLOUDEVENT, Envelope.CLOUDEVENTS, attributes=marked("plain"))
    assert (message.id, message.json()) == ("m-1", {"account": "a-1", "amount": 10})


@pytest.mark.parametrize("envelope", [Envelope.AUTO, Envelope.RAW])
def test_a_body_is_restored_for_who_wants_it_raw_too(envelope: Envelope) -> None:
    assert readable("AP8=", envelope, attributes=marked("base64")).body == b"\x00\xff"


def test_json_has_to_be_json_after_it_is_restored() -> None:
    assert readable("e30=", Envelope.JSON, attributes=marked("base64")).json() == {}
    assert isinstance(opened("{}", Envelope.JSON, attributes=marked("empty")).problem, MalformedMessage)


@pytest.mark.parametrize(("body", "encoding"), [("not base64!", "base64"), ("x", "later")])
def test_a_body_that_cannot_be_restored_is_a_problem_and_keeps_all_there_is(body: str, encoding: str) -> None:
    delivery = opened(body, attributes=marked(encoding))
    assert isinstance(delivery.problem, MalformedMessage)
    assert delivery.body == body.encode()
    assert delivery.envelope["attributes"]["txbox-body"] == attribute(encoding)


def test_an_event_whose_body_cannot_be_restored_is_a_problem() -> None:
    resources = ["message-id:m-1", "body:later"]
    assert isinstance(opened({**EVENTBRIDGE_EVENT, "resources": resources}).problem, MalformedMessage)


@pytest.mark.parametrize("resources", [["arn:aws:s3:::bucket"], "message-id:m", None, [7]], ids=str)
def test_an_event_of_somebody_elses(resources: object) -> None:
    message = readable({**EVENTBRIDGE_EVENT, "resources": resources})
    assert message.id == EVENTBRIDGE_EVENT["id"]
    assert "message-id" not in message.headers
