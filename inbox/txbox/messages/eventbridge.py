"""How a message travels through EventBridge: its body is the event's detail, everything else is in the resources.

The detail is the body and nothing else, so that rules match what was published, and a consumer without txbox finds what
it expects. An event has no place for headers; its resources are a list of arbitrary texts that arrive with the event,
and rules can match them too (``{"resources": ["header:tenant=t-1"]}``). So the resources are:

- ``message-id:`` and the message's id, which marks the event as one of ours;
- ``key:`` and the key, if there is one;
- ``header:``, the name, ``=`` and the value, for each header;
- ``body:`` and how to turn the detail back into the body.

Characters other than printable ASCII, ``%`` and, in a name, ``=`` are percent-encoded. A value that is too long for one
resource continues in another one with the same beginning. (EventBridge's TraceHeader is not used: it accepts only
X-Ray's form; ``traceparent`` travels as a header.)

EventBridge parses the detail and writes it again, which changes blanks and escapes. If a body is written in one of the
ordinary ways, it is restored by writing it in that way again. Any other body travels a second time, compressed.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from txbox.errors import MalformedMessage

DEFAULT_SOURCE = "txbox"
"""An event's source, if no header ``source`` names one."""

DEFAULT_DETAIL_TYPE = "message"
"""An event's detail type, if no header ``detail-type`` names one."""

MAX_RESOURCE_CHARACTERS = 2_048
"""https://docs.aws.amazon.com/eventbridge/latest/APIReference/API_PutEventsRequestEntry.html"""

MAX_BODY_BYTES = 16 * 1024 * 1024
"""For a body that arrives compressed; far more than can be sent."""


@dataclass(frozen=True, slots=True)
class EventEntry:
    """A message as an entry of PutEvents."""

    source: str
    detail_type: str
    detail: str
    resources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EventLabels:
    """What the resources of one of our events mean; ``written`` says how to turn the detail back into the body."""

    message_id: str
    key: str | None
    headers: Mapping[str, str]
    written: str


def is_event_detail(body: bytes) -> bool:
    """Whether EventBridge accepts a body: it is a JSON object whose integers have at most 64 bits.

    https://docs.aws.amazon.com/eventbridge/latest/APIReference/API_PutEvents.html
    """
    try:
        return isinstance(json.loads(body.decode(), parse_int=_integer, parse_constant=_no_json), dict)
    except (ValueError, RecursionError):
        return False


def event_entry(message_id: str, body: bytes, *, key: str | None, headers: Mapping[str, str]) -> EventEntry:
    """Return a message as an entry of PutEvents; the headers ``source`` and ``detail-type`` become the event's.

    ``body`` must be a JSON object; see ``is_event_detail``.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    resources = [
        *_resources(_ID, message_id),
        *(_resources(_KEY, key) if key is not None else ()),
        *(part for name, value in headers.items() for part in _resources(f"{_HEADER}{_name(name)}=", value)),
        *_resources(_BODY, _written(body)),
    ]
    return EventEntry(
        lower.get("source") or DEFAULT_SOURCE,
        lower.get("detail-type") or DEFAULT_DETAIL_TYPE,
        body.decode(),
        tuple(resources),
    )


def entry_bytes(entry: EventEntry) -> int:
    """Return an entry's size as EventBridge counts it.

    https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-putevent-size.html
    """
    parts = (entry.source, entry.detail_type, entry.detail, *entry.resources)
    return sum(len(part.encode()) for part in parts)


def labels(resources: Iterable[Any]) -> EventLabels | None:
    """Return what the resources of an event mean; None if it is not one of ours."""
    joined: dict[str, str] = {}
    for resource in resources:
        if not isinstance(resource, str):
            continue
        kind, colon, value = resource.partition(":")
        beginning = kind + colon
        if beginning == _HEADER:
            name, sign, value = value.partition("=")
            beginning += name + sign
        joined[beginning] = joined.get(beginning, "") + value
    read = {beginning: unquote(value) for beginning, value in joined.items()}
    if not read.get(_ID) or _BODY not in read:
        return None
    headers = {
        unquote(beginning.removeprefix(_HEADER).removesuffix("=")): value
        for beginning, value in read.items()
        if beginning.startswith(_HEADER) and beginning.endswith("=")
    }
    return EventLabels(read[_ID], read.get(_KEY), headers, read[_BODY])


def as_body(detail: bytes, written: str) -> bytes:
    """Return the body that ``event_entry`` was given; raise ``MalformedMessage`` if it cannot be restored.

    ``detail`` is as written in the event that arrived; ``written`` is ``EventLabels.written``.
    """
    how, _, compressed = written.partition("=")
    try:
        if how == _DEFLATE:
            inflating = zlib.decompressobj()
            body = inflating.decompress(base64.b64decode(compressed, validate=True), MAX_BODY_BYTES)
            if not inflating.eof:
                raise ValueError("it is cut short, or too large")
            return body
        if how in _WAYS:
            return json.dumps(json.loads(detail), **_WAYS[how]).encode()
    except (ValueError, RecursionError, zlib.error) as error:
        raise MalformedMessage(f"the body of an event cannot be restored: {error}") from error
    raise MalformedMessage(f"the body of an event is written as {how!r}, which this version of txbox does not know")


def _written(body: bytes) -> str:
    value = json.loads(body)
    for name, way in _WAYS.items():
        try:
            if json.dumps(value, **way).encode() == body:
                return name
        except UnicodeEncodeError:
            continue  # half a surrogate pair can only be written escaped
    return f"{_DEFLATE}={base64.b64encode(zlib.compress(body)).decode()}"


def _resources(beginning: str, value: str) -> list[str]:
    room = MAX_RESOURCE_CHARACTERS - len(beginning)
    safe = quote(value, safe=_PRINTABLE)
    return [beginning + safe[start : start + room] for start in range(0, len(safe), room)] or [beginning]


def _name(name: str) -> str:
    return quote(name, safe=_PRINTABLE.replace("=", ""))


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError("an integer of more than 64 bits")
    return int(digits)


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_ID, _KEY, _HEADER, _BODY = "message-id:", "key:", "header:", "body:"
_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
_DEFLATE = "deflate"
_COMPACT, _SPACED = (",", ":"), (", ", ": ")
_WAYS: Mapping[str, Mapping[str, Any]] = {
    "compact": {"separators": _COMPACT, "ensure_ascii": False},
    "spaced": {"separators": _SPACED, "ensure_ascii": False},
    "compact-ascii": {"separators": _COMPACT, "ensure_ascii": True},
    "spaced-ascii": {"separators": _SPACED, "ensure_ascii": True},
}
