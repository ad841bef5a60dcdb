"""Messages on their way through EventBridge: whatever goes in comes out."""

import base64
import json
import zlib
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from txbox import MalformedMessage
from txbox.messages.eventbridge import as_body, entry_bytes, event_entry, is_event_detail, labels

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
objects = st.dictionaries(st.text(), json_values, max_size=4)
ways = st.fixed_dictionaries(
    {
        "indent": st.none() | st.integers(0, 2),
        "sort_keys": st.booleans(),
        "ensure_ascii": st.booleans(),
        "separators": st.sampled_from([None, (",", ":"), (" , ", " : ")]),
    }
)
bodies = st.builds(lambda value, way: json.dumps(value, **way).encode(), objects, ways)


def rewritten(detail: str) -> bytes:
    """A detail as a service writes it that has parsed it."""
    return json.dumps(json.loads(detail), separators=(",", ":")).encode()


@given(
    body=bodies,
    message_id=st.text(min_size=1),
    key=st.none() | st.text(min_size=1),
    headers=st.dictionaries(st.text(st.characters(codec="ascii"), min_size=1), st.text(), max_size=4),
)
@example(body=b'{"a": 1.10, "a":1e400}', message_id="m", key="%", headers={"a=b": "c=d", "%": "", "x": "y" * 5_000})
@example(body=b'{"\\ud800": "\\/"}', message_id="header:a=b", key="k", headers={"": "no name"})
def test_whatever_goes_in_comes_out(body: bytes, message_id: str, key: str | None, headers: dict[str, str]) -> None:
    entry = event_entry(message_id, body, key=key, headers=headers)
    assert all(resource.isascii() and len(resource) <= 2_048 for resource in entry.resources)
    assert entry.detail.encode() == body
    read = labels(json.loads(json.dumps(entry.resources)))
    assert read is not None
    assert (read.message_id, read.key, read.headers) == (message_id, key, headers)
    assert as_body(rewritten(entry.detail), read.written) == body


@pytest.mark.parametrize(
    ("body", "resource"),
    [
        (b'{"a":1}', "body:compact"),
        (b'{"a": 1}', "body:spaced"),
        ('{"a":"é"}'.encode(), "body:compact"),
        (b'{"a": "\\u00e9"}', "body:spaced-ascii"),
    ],
)
def test_a_body_written_in_an_ordinary_way_does_not_travel_twice(body: bytes, resource: str) -> None:
    assert event_entry("m", body, key=None, headers={}).resources == ("message-id:m", resource)


def test_what_rules_match_on_is_readable() -> None:
    entry = event_entry("m-1", b"{}", key="account 1", headers={"tenant": "t=1", "Größe": "é%"})
    assert entry.resources[:-1] == (
        "message-id:m-1",
        "key:account 1",
        "header:tenant=t=1",
        "header:Gr%C3%B6%C3%9Fe=%C3%A9%25",
    )


def test_size_is_that_of_all_parts() -> None:
    entry = event_entry("m", '{"a":"é"}'.encode(), key=None, headers={})
    assert entry_bytes(entry) == len("txbox") + len("message") + 10 + len("message-id:m") + len("body:compact")


@pytest.mark.parametrize(
    "resources",
    [[], ["arn:aws:s3:::bucket"], ["message-id:m"], ["body:compact"], ["message-id:", "body:compact"], [7, None, {}]],
    ids=str,
)
def test_other_peoples_resources_say_nothing(resources: list[Any]) -> None:
    assert labels(resources) is None


def test_other_resources_among_ours_are_left_alone() -> None:
    read = labels(["arn:aws:s3:::b", "message-id:m", 7, "header:no sign", "body:compact", "other"])
    assert read is not None
    assert (read.message_id, read.key, read.headers, read.written) == ("m", None, {}, "compact")


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        (b"{}", True),
        (f'{{"a": {2**63 - 1}}}'.encode(), True),
        (f'{{"a": {2**63}}}'.encode(), False),
        (f'{{"a": {-(2**63) - 1}}}'.encode(), False),
        (b'{"a": ' + b"9" * 5_000 + b"}", False),
        (b'{"a": NaN}', False),
        (b'{"a": Infinity}', False),
        (b"[]", False),
        (b"", False),
        (b"{", False),
        (b"\xff", False),
        (b'\xef\xbb\xbf{"a": 1}', False),
        (b'{"a":' * 100_000, False),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_detail_is_a_json_object_with_integers_of_64_bits(body: bytes, taken: bool) -> None:
    assert is_event_detail(body) is taken


BOMB = base64.b64encode(zlib.compress(b"0" * 20_000_000)).decode()


@pytest.mark.parametrize(
    ("detail", "written", "why"),
    [
        *((b"{}", written, ".") for written in ("later", "deflate=", "deflate=!", "deflate=AAAA", "deflate=eJw=")),
        (b"{", "compact", "cannot be restored"),
        (b"{}", f"deflate={BOMB}", "too large"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_cannot_be_restored_is_malformed(detail: bytes, written: str, why: str) -> None:
    with pytest.raises(MalformedMessage, match=why):
        as_body(detail, written)
