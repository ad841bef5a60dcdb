"""How a message travels where only text may: SQS and SNS accept the characters of XML 1.0, and no empty body.

A body of such text travels as it is, so that any consumer can read it; any other body travels encoded. An attribute
names the encoding, and the worker's envelopes decode the body again, so every body comes out as it went in. Every
message has the attribute, because it also means: this is the body, even if it looks like one of AWS's wrappers.
(``message-id`` cannot mean that: a redriven message has one, and is still in its wrapper.)

For EventBridge, which accepts JSON, see ``txbox.messages.eventbridge``.
"""

import base64
import re
from collections.abc import Mapping
from enum import StrEnum

from txbox.errors import MalformedMessage
from txbox.messages.message import HEADER_MESSAGE_ID

RESERVED_PREFIX = "txbox-"
"""No header's name may begin with this."""

HEADER_BODY_ENCODING = "txbox-body"
"""The attribute that says how the body is encoded."""

OWN_ATTRIBUTES = 2
"""How many attributes of each message are ours."""


class BodyEncoding(StrEnum):
    PLAIN = "plain"
    BASE64 = "base64"
    EMPTY = "empty"
    """There is no body; the text sent in its place means nothing."""


def is_wire_text(text: str) -> bool:
    """Whether SQS and SNS accept a text: it is not empty, and XML allows all of its characters."""
    return bool(text) and _NO_XML_CHARACTER.search(text) is None


def encoded(body: bytes) -> tuple[str, BodyEncoding]:
    """Return a body as text that SQS and SNS accept, and how it is encoded."""
    if not body:
        return "-", BodyEncoding.EMPTY
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = ""
    if not is_wire_text(text):
        return base64.b64encode(body).decode(), BodyEncoding.BASE64
    return text, BodyEncoding.PLAIN


def decoded(text: str, encoding: str | None) -> bytes:
    """Return the body that ``encoded`` was given. ``encoding`` None: the message is not ours, and the text is its body.

    Raise ``MalformedMessage`` if the encoding is unknown, or does not match the text.
    """
    match encoding:
        case None | BodyEncoding.PLAIN:
            return text.encode("utf-8", "surrogatepass")
        case BodyEncoding.EMPTY:
            return b""
        case BodyEncoding.BASE64:
            try:
                return base64.b64decode(text, validate=True)
            except ValueError as error:
                raise MalformedMessage(f"a body that should be base64 is not: {error}") from error
    raise MalformedMessage(f"a body is encoded as {encoding!r}, which this version of txbox does not know")


def attributes(message_id: str, headers: Mapping[str, str], encoding: BodyEncoding) -> dict[str, str]:
    """Return what travels beside a body as attributes of SQS and SNS: every header, and our own."""
    return {**headers, HEADER_MESSAGE_ID: message_id, HEADER_BODY_ENCODING: encoding.value}


def wire_bytes(text: str, travelling: Mapping[str, str]) -> int:
    """Return a message's size as SQS and SNS count it: body, and name, type and value of each attribute."""
    beside = sum(len(name.encode()) + len(_STRING) + len(value.encode()) for name, value in travelling.items())
    return len(text.encode()) + beside


_STRING = "String"
# https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_SendMessage.html
_NO_XML_CHARACTER = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
