"""Open envelopes: turn what SQS delivers into the message that the producer sent. Pure functions, no I/O.

A message may be wrapped several times, such as an EventBridge event inside an SNS notification inside an SQS message.
Each wrapper is taken off, and what it says about the message becomes headers. The header names that ``txbox.identify``
looks at are in ``txbox.messages.message``.

A message that an outbox of txbox has sent says so on the wrapper that it was put into: in the attributes of SQS or SNS,
or in the resources of an EventBridge event. Its body is restored byte for byte, and no more wrappers are taken off
unasked, however much the body resembles one.
"""

import base64
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from txbox import Identify, MalformedMessage, Message, TxboxError, identify
from txbox.messages.attributes import HEADER_BODY_ENCODING, decoded
from txbox.messages.eventbridge import as_body, labels
from txbox.messages.message import (
    HEADER_CLOUDEVENTS_ID,
    HEADER_CLOUDEVENTS_SOURCE,
    HEADER_DEDUPLICATION_ID,
    HEADER_EVENTBRIDGE_ID,
    HEADER_EVENTBRIDGE_KEY,
    HEADER_FIRST_DELIVERY_ID,
    HEADER_GROUP_ID,
    HEADER_MESSAGE_ID,
    HEADER_SNS_MESSAGE_ID,
    earliest,
    time_from,
    valid_message_id,
)
from txbox_workers.delivery import Delivery

__all__ = ["Envelope", "open_envelope"]


class Envelope(StrEnum):
    """How to read the body of an SQS message."""

    AUTO = "auto"
    """Take off every wrapper that is recognised. Anything else is the payload, and so is what an outbox has sent."""
    RAW = "raw"
    """The body is the payload."""
    JSON = "json"
    """The body is the payload and must be JSON."""
    SNS = "sns"
    """The body must be an SNS notification; its Message is the payload, or another wrapper."""
    EVENTBRIDGE = "eventbridge"
    """The body must be an EventBridge event; its detail is the payload."""
    CLOUDEVENTS = "cloudevents"
    """The body must be a structured CloudEvent, or the attributes a binary one; its data is the payload."""


def open_envelope(
    record: Mapping[str, Any],
    source: str,
    *,
    envelope: Envelope = Envelope.AUTO,
    identify: Identify = identify,
) -> Delivery:
    """Return the delivery of a message that SQS's ReceiveMessage has returned.

    Args:
        record: MessageId, ReceiptHandle, Body, Attributes, MessageAttributes.
        source: the queue's URL.
        envelope: how to read the body.
        identify: chooses the id.

    Returns:
        The delivery. One that cannot be read has its ``problem`` set, and the id that the broker gave it first: it is
        processed as a failed message instead of being dropped.
    """
    system = record.get("Attributes") or {}
    attributes = record.get("MessageAttributes") or {}
    text = record.get("Body") or ""
    broker_id = str(record["MessageId"])
    headers = _attribute_headers(attributes)
    if "MessageDeduplicationId" in system:
        # A redrive needs a new id and sends the old one as an attribute: the old one counts.
        headers.setdefault(HEADER_DEDUPLICATION_ID, system["MessageDeduplicationId"])
    if "MessageGroupId" in system:
        headers[HEADER_GROUP_ID] = system["MessageGroupId"]
    # When it was put into its queue. For standard queues, a move to a dead-letter queue does not change that.
    sent_at = time_from(system.get("SentTimestamp"))
    raw = Message(broker_id, text.encode("utf-8", "surrogatepass"), MappingProxyType(headers), source, sent_at)
    problem: Exception | None = None
    message = raw
    try:
        if (encoding := headers.get(HEADER_BODY_ENCODING)) is not None:
            message = replace(raw, body=decoded(text, encoding))
        message = _unmarked(_unwrapped(message, envelope))
        if times := [time_from(message.headers[name]) for name in _TIMES if name in message.headers]:
            sent_at = earliest(sent_at, *times)
        message = Message(valid_message_id(identify(message)), message.body, message.headers, source, sent_at)
    except Exception as error:  # noqa: BLE001 - identify is the host's code: if it fails, the message must not be lost
        message, problem = raw, error if isinstance(error, TxboxError) else _unidentified(error)
        with suppress(TxboxError):  # a redriven dead letter that still cannot be read is still that message
            message = replace(raw, id=valid_message_id(headers.get(HEADER_FIRST_DELIVERY_ID, broker_id)))
    return Delivery(
        message=message,
        receipt=record["ReceiptHandle"],
        receive_count=int(system.get("ApproximateReceiveCount", 1)),
        # On a standard queue, the group is only for fair sharing; it keeps no order.
        group=system.get("MessageGroupId") if source.endswith(".fifo") else None,
        body=raw.body,
        envelope={"attributes": _sendable(attributes), "system": dict(system)},
        problem=problem,
    )


def _unidentified(error: Exception) -> MalformedMessage:
    malformed = MalformedMessage(f"the message's id could not be read: {type(error).__name__}: {error}")
    malformed.__cause__ = error
    return malformed


# --- taking wrappers off ---------------------------------------------------------------------------------------------


def _unwrapped(message: Message, envelope: Envelope) -> Message:
    match envelope:
        case Envelope.RAW:
            return message
        case Envelope.JSON:
            message.json()
            return message
        case Envelope.AUTO:
            return _without(message, _SNS, _EVENTBRIDGE, _CLOUDEVENT)
        case Envelope.SNS:
            opened = _from_sns(message, _expected(message, _is_sns, "an SNS notification"))
            return _without(opened, _EVENTBRIDGE, _CLOUDEVENT)
        case Envelope.EVENTBRIDGE:
            inner = _without(message, _SNS)
            return _from_eventbridge(inner, _expected(inner, _is_eventbridge, "an EventBridge event"))
        case Envelope.CLOUDEVENTS:
            inner = _without(message, _SNS)
            if _is_binary_cloudevent(inner):
                return inner
            return _from_cloudevent(inner, _expected(inner, _is_cloudevent, "a CloudEvent"))


_Test = Callable[[Mapping[str, Any]], bool]
_Opener = Callable[[Message, Mapping[str, Any]], Message]


def _without(message: Message, *wrappers: tuple[_Test, _Opener]) -> Message:
    """Take off the wrappers found: at most one of each kind, in the only order in which AWS nests them."""
    parsed, document = None, None
    for is_wrapper, opened in wrappers:
        if HEADER_BODY_ENCODING in message.headers:
            return message  # an outbox has sent this body; resemblance means nothing
        if message is not parsed:  # parse once per body, not once per kind of wrapper
            parsed, document = message, _document(message)
        if document is not None and is_wrapper(document):
            message = opened(message, document)
    return message


def _expected(message: Message, is_wrapper: _Test, what: str) -> Mapping[str, Any]:
    document = _document(message)
    if document is None or not is_wrapper(document):
        raise MalformedMessage(f"message {message.id} is not {what}")
    return document


def _document(message: Message) -> Mapping[str, Any] | None:
    """Return the body as a JSON object; None if it is not one. Only parse what may be a wrapper."""
    if not message.body.lstrip(_JSON_BLANKS).startswith(b"{"):
        return None
    try:
        document = _DECODER.decode(message.body.decode("utf-8", "surrogatepass"))
    except RecursionError as error:
        # It may be a wrapper, so it must not be passed on as a payload: its id would be different.
        raise MalformedMessage(f"message {message.id} is nested too deeply to be read") from error
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _with(message: Message, body: bytes, headers: Mapping[str, Any]) -> Message:
    merged = {**message.headers, **{name: str(value) for name, value in headers.items() if value is not None}}
    return replace(message, body=body, headers=MappingProxyType(merged))


def _unmarked(message: Message) -> Message:
    """Remove the header that only says how the body was encoded for sending."""
    if HEADER_BODY_ENCODING not in message.headers:
        return message
    headers = {name: value for name, value in message.headers.items() if name != HEADER_BODY_ENCODING}
    return replace(message, headers=MappingProxyType(headers))


def _member(message: Message, name: str) -> bytes:
    """Return a member of the JSON object in the message's body exactly as written there, character for character.

    Parsing and writing it again would change it: 10.10 would become 10.1, and a long decimal would lose its last
    digits. If several have the name, the last counts, as in ``json.loads``.
    """
    text = message.body.decode("utf-8", "surrogatepass")
    written = ""
    position = _past_blanks(text, text.index("{") + 1)
    while text[position] != "}":
        key, position = _DECODER.raw_decode(text, position)
        start = _past_blanks(text, text.index(":", position) + 1)
        _, end = _DECODER.raw_decode(text, start)
        if key == name:
            written = text[start:end]
        position = _past_blanks(text, end)
        if text[position] == ",":
            position = _past_blanks(text, position + 1)
    return written.encode("utf-8", "surrogatepass")


def _past_blanks(text: str, position: int) -> int:
    while text[position] in " \t\r\n":
        position += 1
    return position


# SNS: https://docs.aws.amazon.com/sns/latest/dg/sns-message-and-json-formats.html


def _is_sns(document: Mapping[str, Any]) -> bool:
    return document.get("Type") == "Notification" and all(
        isinstance(document.get(name), str) for name in ("MessageId", "TopicArn", "Message")
    )


def _from_sns(message: Message, document: Mapping[str, Any]) -> Message:
    attributes = document.get("MessageAttributes")
    headers = _attribute_headers(attributes) if isinstance(attributes, dict) else {}
    encoding = headers.get(HEADER_BODY_ENCODING)
    return _with(
        message,
        document["Message"].encode() if encoding is None else decoded(document["Message"], encoding),
        {
            **headers,
            HEADER_SNS_MESSAGE_ID: document["MessageId"],
            "sns-topic-arn": document["TopicArn"],
            "sns-subject": document.get("Subject"),
            HEADER_SNS_TIMESTAMP: document.get("Timestamp"),
        },
    )


# EventBridge: https://docs.aws.amazon.com/eventbridge/latest/ref/overiew-event-structure.html


def _is_eventbridge(document: Mapping[str, Any]) -> bool:
    return "detail" in document and all(
        isinstance(document.get(name), str) for name in ("id", "source", "detail-type", "time", "account", "region")
    )


def _from_eventbridge(message: Message, document: Mapping[str, Any]) -> Message:
    resources, body, headers = document.get("resources"), _member(message, "detail"), {}
    if isinstance(resources, list) and (ours := labels(resources)) is not None:
        body = as_body(body, ours.written)
        headers = {_header_name(name): value for name, value in ours.headers.items()}
        headers |= {HEADER_MESSAGE_ID: ours.message_id, HEADER_BODY_ENCODING: ours.written}
        headers |= {HEADER_EVENTBRIDGE_KEY: ours.key} if ours.key is not None else {}
    return _with(
        message,
        body,
        {
            **headers,
            HEADER_EVENTBRIDGE_ID: document["id"],
            "eventbridge-source": document["source"],
            "eventbridge-detail-type": document["detail-type"],
            HEADER_EVENTBRIDGE_TIME: document["time"],
            "eventbridge-account": document["account"],
            "eventbridge-region": document["region"],
        },
    )


# CloudEvents 1.0: https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/formats/json-format.md


def _is_cloudevent(document: Mapping[str, Any]) -> bool:
    return all(isinstance(document.get(name), str) for name in ("specversion", "id", "source", "type"))


def _is_binary_cloudevent(message: Message) -> bool:
    return HEADER_CLOUDEVENTS_ID in message.headers and HEADER_CLOUDEVENTS_SOURCE in message.headers


def _from_cloudevent(message: Message, document: Mapping[str, Any]) -> Message:
    if _is_binary_cloudevent(message):
        return message  # its attributes are the event, so a body that looks like one is data
    if "data_base64" in document:
        try:
            body = base64.b64decode(document["data_base64"], validate=True)
        except (ValueError, TypeError) as error:
            raise MalformedMessage(f"data_base64 of CloudEvent {document['id']} is not base64: {error}") from error
    elif isinstance(document.get("data"), str) and "json" not in str(document.get("datacontenttype") or "json"):
        body = document["data"].encode()
    else:
        body = _member(message, "data") if "data" in document else b""
    context = {
        f"ce-{name}": str(value).lower() if isinstance(value, bool) else value
        for name, value in document.items()
        if name not in ("data", "data_base64") and isinstance(value, str | int | bool)
    }
    return _with(message, body, context)


# --- attributes ------------------------------------------------------------------------------------------------------


def _attribute_headers(attributes: Mapping[str, Any]) -> dict[str, str]:
    """Return message attributes as headers; SQS and SNS spell them differently.

    CloudEvents in binary mode come with the prefix ``ce-``, ``ce_``, ``cloudEvents_`` or ``cloudEvents:`` (an SQS
    attribute's name may contain no colon, but other bindings' may); all become ``ce-``.
    """
    headers = {}
    for name, attribute in attributes.items():
        value = attribute.get("StringValue", attribute.get("Value"))
        if value is None:
            value = attribute.get("BinaryValue")
            if isinstance(value, bytes):
                value = base64.b64encode(value).decode()
        if value is not None:
            headers[_header_name(name)] = str(value)
    return headers


def _header_name(name: str) -> str:
    lower = name.lower()
    for prefix in ("cloudevents:", "cloudevents_", "ce_"):
        if lower.startswith(prefix):
            return f"ce-{lower.removeprefix(prefix)}"
    return lower


def _sendable(attributes: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return message attributes in a form that JSON can hold and ``restored_attributes`` can undo."""
    kept = {}
    for name, attribute in attributes.items():
        value = {"DataType": attribute.get("DataType", "String")}
        if "StringValue" in attribute:
            value["StringValue"] = attribute["StringValue"]
        if "BinaryValue" in attribute:
            value["BinaryValue"] = base64.b64encode(attribute["BinaryValue"]).decode()
        kept[name] = value
    return kept


def restored_attributes(kept: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """Return the message attributes in a dead letter's envelope as SQS's SendMessage takes them."""
    return {
        name: {
            field: base64.b64decode(value) if field == "BinaryValue" else value for field, value in attribute.items()
        }
        for name, attribute in kept.items()
    }


def _number(digits: str) -> int | float:
    """Return a number of any length: Python refuses to make an int of more than 4,300 digits."""
    return int(digits) if len(digits) < _LONGEST_INT else float(digits)


_SNS = (_is_sns, _from_sns)
_EVENTBRIDGE = (_is_eventbridge, _from_eventbridge)
_CLOUDEVENT = (_is_cloudevent, _from_cloudevent)

HEADER_SNS_TIMESTAMP = "sns-timestamp"
"""When a message was published to SNS."""
HEADER_EVENTBRIDGE_TIME = "eventbridge-time"
"""When an event was put, or the time that its producer set."""
HEADER_CLOUDEVENTS_TIME = "ce-time"
"""When the occurrence that a CloudEvent describes happened."""

_TIMES = (HEADER_SNS_TIMESTAMP, HEADER_EVENTBRIDGE_TIME, HEADER_CLOUDEVENTS_TIME)
_LONGEST_INT = 4_000
_DECODER = json.JSONDecoder(parse_int=_number)  # json.loads makes a decoder for each call with options
_JSON_BLANKS = b" \t\r\n"
