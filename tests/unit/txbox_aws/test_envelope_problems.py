"""Envelopes that cannot be opened: the delivery says so, and keeps all that is known of it."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.aws.envelopes import (
    BROKER_ID,
    CLOUDEVENT,
    EVENTBRIDGE_EVENT,
    SNS_NOTIFICATION,
    attributes_of_sqs,
    opened,
    received,
    without,
)
from support.aws.queues import QUEUE
from txbox import MalformedMessage
from txbox_aws.envelopes import Envelope, open_envelope

TOO_DEEP = "is nested too deeply to be read"
UNREADABLE = ["", " ", "purchase 1", "{", "[]", "[1]", "null", "12", '"text"', "{}", '{"a":' * 100_000, "9" * 10_000]


# --- what was promised -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", UNREADABLE, ids=lambda body: body[:10])
@pytest.mark.parametrize(
    ("envelope", "what"),
    [
        (Envelope.SNS, "is not an SNS notification"),
        (Envelope.EVENTBRIDGE, "is not an EventBridge event"),
        (Envelope.CLOUDEVENTS, "is not a CloudEvent"),
    ],
)
def test_a_wrapper_that_was_promised_has_to_be_there(envelope: Envelope, what: str, body: str) -> None:
    system = {"ApproximateReceiveCount": "3", "MessageGroupId": "a-1"}
    delivery = opened(body, envelope, queue=f"{QUEUE}.fifo", system=system)
    assert isinstance(delivery.problem, MalformedMessage)
    assert str(delivery.problem) in (f"message {BROKER_ID} {what}", f"message {BROKER_ID} {TOO_DEEP}")
    # It goes the way of a failed message, so all that is known of it is kept.
    assert (delivery.message.id, delivery.message.body, delivery.body) == (BROKER_ID, body.encode(), body.encode())
    assert (delivery.receive_count, delivery.group) == (3, "a-1")


@pytest.mark.parametrize("envelope", [Envelope.EVENTBRIDGE, Envelope.CLOUDEVENTS])
def test_sns_around_something_else_than_was_promised(envelope: Envelope) -> None:
    assert isinstance(opened(SNS_NOTIFICATION, envelope).problem, MalformedMessage)


@pytest.mark.parametrize("body", ["", "{", "purchase 1", "[" * 200_000, "9" * 10_000], ids=lambda body: body[:10])
def test_json_that_was_promised_has_to_be_json(body: str) -> None:
    problem = opened(body, Envelope.JSON).problem
    assert isinstance(problem, MalformedMessage)
    assert f"message {BROKER_ID} is not JSON" in str(problem)


# --- what cannot be read ---------------------------------------------------------------------------------------------


def test_what_is_nested_too_deeply_to_be_looked_at_is_not_passed_on_under_another_id() -> None:
    event = json.dumps({**CLOUDEVENT, "data": "HERE"}).replace('"HERE"', "[" * 200_000 + "]" * 200_000)
    problem = opened(event).problem
    assert isinstance(problem, MalformedMessage)
    assert str(problem) == f"message {BROKER_ID} {TOO_DEEP}"


@pytest.mark.parametrize("data", ["not base64!", 7, None, ["AAEC"]])
@pytest.mark.parametrize("envelope", [Envelope.AUTO, Envelope.CLOUDEVENTS])
def test_a_cloudevent_with_broken_base64_is_malformed(data: object, envelope: Envelope) -> None:
    problem = opened({**without(CLOUDEVENT, "data"), "data_base64": data}, envelope).problem
    assert isinstance(problem, MalformedMessage)
    assert "data_base64 of CloudEvent A234-1234-1234 is not base64" in str(problem)


@pytest.mark.parametrize("body", [{**SNS_NOTIFICATION, "Message": "\ud800"}, {**CLOUDEVENT, "source": "\ud800"}])
def test_half_a_surrogate_pair_where_text_is_needed_is_malformed(body: dict[str, Any]) -> None:
    delivery = opened(body)
    assert isinstance(delivery.problem, MalformedMessage)
    assert isinstance(delivery.problem.__cause__, UnicodeEncodeError)


# --- whatever comes --------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
damaged_wrappers = st.builds(
    lambda wrapper, name, value: json.dumps({**wrapper, name: value}),
    st.sampled_from([SNS_NOTIFICATION, EVENTBRIDGE_EVENT, CLOUDEVENT]),
    st.sampled_from(sorted({*SNS_NOTIFICATION, *EVENTBRIDGE_EVENT, *CLOUDEVENT, "data_base64"})),
    json_values,
)
any_text = st.text(st.characters())


@given(
    body=any_text | json_values.map(json.dumps) | damaged_wrappers,
    envelope=st.sampled_from(Envelope),
    attributes=st.just({}) | attributes_of_sqs,
)
@example(body="\ud800", envelope=Envelope.AUTO, attributes={})
@example(body='{"a":' * 100_000, envelope=Envelope.AUTO, attributes={})
@example(body=f'{{"detail": {"9" * 10_000}}}', envelope=Envelope.AUTO, attributes={})
def test_no_body_at_all_makes_open_envelope_raise(
    body: str, envelope: Envelope, attributes: dict[str, dict[str, Any]]
) -> None:
    delivery = open_envelope(received("") | {"Body": body, "MessageAttributes": attributes}, QUEUE, envelope=envelope)
    assert delivery.body == body.encode("utf-8", "surrogatepass")
    if delivery.problem is not None:
        assert (delivery.message.id, delivery.message.body) == (BROKER_ID, delivery.body)
    elif envelope in (Envelope.RAW, Envelope.JSON):
        assert delivery.message.body == delivery.body
