"""``Message``, and the choice of its id."""

import dataclasses
import hashlib
import itertools
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txbox import InvalidMessageId, MalformedMessage, Message, identify
from txbox.messages.message import MAX_MESSAGE_ID_BYTES, earliest, fingerprint, time_from, time_of_id, valid_message_id
from txbox.outbox.message_ids import new_message_id

MADE = "019dd9c0-0e3b-7abc-8def-0123456789ab"
MADE_AT = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=0x019DD9C00E3B)
T = datetime(2026, 4, 2, 10, 15, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    "written", [MADE, MADE.upper(), MADE.replace("-", ""), f"urn:uuid:{MADE}", f"URN:UUID:{MADE.upper()}"]
)
def test_an_id_of_version_7_has_its_time_however_it_is_written(written: str) -> None:
    assert time_of_id(written) == MADE_AT


def test_an_id_of_our_own_was_made_now() -> None:
    made = time_of_id(new_message_id())
    assert made is not None
    assert abs(made - datetime.now(UTC)) < timedelta(seconds=60)


@pytest.mark.parametrize(
    "other",
    [
        "",
        "a",
        "x" * 36,
        str(uuid.UUID(int=uuid.UUID(MADE).int & ~(0xF << 76) | 4 << 76)),  # version 4
        str(uuid.UUID(int=uuid.UUID(MADE).int & ~(0b11 << 62))),  # another variant
        str(uuid.UUID(int=uuid.UUID(MADE).int & ((1 << 80) - 1))),  # of 1970
        MADE.replace("-", "", 1) + "-",
        MADE[:-1] + "g",
        f"{{{MADE[:-2]}}}",
        f"urn:uuid:{MADE}"[:44] + "\n",
        MADE.replace("0", "\u0660"),  # a digit, but not of ASCII
    ],
)
def test_other_ids_have_no_time(other: str) -> None:
    assert time_of_id(other) is None


@pytest.mark.parametrize(
    ("written", "time"),
    [
        ("1775124930123", T + timedelta(milliseconds=123)),
        (1775124930123, T + timedelta(milliseconds=123)),
        ("2026-04-02T10:15:30Z", T),
        ("2026-04-02t10:15:30.123456789z", T + timedelta(microseconds=123456)),
        ("2026-04-02T12:15:30.5+02:00", T + timedelta(milliseconds=500)),
        ("2026-04-02T10:15:60Z", T + timedelta(seconds=29)),
    ],
)
def test_times_as_they_are_written(written: object, time: datetime) -> None:
    assert time_from(written) == time


@pytest.mark.parametrize(
    "written",
    [
        *(None, "", "soon", 3.5, True, "2026-04-02T10:15:30", "1999-01-01T00:00:00Z", "9" * 60, "9" * 5_000, "-1"),
        *("\u0663" * 13, "2026-13-02T10:15:30Z", "0001-01-01T00:00:00+23:59", "0", {}),
    ],
)
def test_what_is_no_time_is_unknown_and_no_error(written: object) -> None:
    assert time_from(written) is None


def test_the_earliest_of_what_is_known_counts() -> None:
    assert earliest(None, T, None, T - timedelta(1)) == T - timedelta(1)
    assert earliest(None) is None


def test_when_it_was_sent_is_no_part_of_what_a_message_is() -> None:
    assert Message("a", b"", sent_at=T) == Message("a", b"")


# Each header that identify looks at, and the id it stands for; the best first.
CANDIDATES: list[tuple[dict[str, str], str]] = [
    ({"message-id": "own"}, "own"),
    ({"ce-source": "/shop", "ce-id": "7"}, "/shop 7"),
    ({"eventbridge-id": "bridge"}, "bridge"),
    ({"sns-message-id": "sns"}, "sns"),
    ({"sqs-deduplication-id": "dedup"}, "dedup"),
]
BROKER_ID = "broker"

words = st.text(min_size=1, max_size=30)
uris = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=30)


def message(headers: dict[str, str], body: bytes = b"{}") -> Message:
    return Message(BROKER_ID, body, headers, "queue")


@pytest.mark.parametrize("present", list(itertools.product([True, False], repeat=len(CANDIDATES))))
def test_identify_takes_the_best_header_there_is(present: tuple[bool, ...]) -> None:
    chosen = [candidate for candidate, is_there in zip(CANDIDATES, present, strict=True) if is_there]
    headers = {name: value for candidate, _ in chosen for name, value in candidate.items()}
    assert identify(message(headers)) == (chosen[0][1] if chosen else BROKER_ID)


@pytest.mark.parametrize("name", ["message-id", "eventbridge-id", "sns-message-id", "sqs-deduplication-id"])
def test_an_empty_header_counts_as_absent(name: str) -> None:
    assert identify(message({name: ""})) == BROKER_ID


@pytest.mark.parametrize("headers", [{"ce-id": "7"}, {"ce-source": "/shop"}, {"ce-id": "", "ce-source": "/shop"}])
def test_half_of_a_cloudevents_id_is_none(headers: dict[str, str]) -> None:
    assert identify(message({**headers, "sns-message-id": "sns"})) == "sns"


@given(st.dictionaries(st.sampled_from(["x-trace", "id", "source", "Message-Id", "ce-type"]), words))
def test_other_headers_have_no_say(others: dict[str, str]) -> None:
    assert identify(message(others)) == BROKER_ID


@given(first=st.tuples(uris, words), second=st.tuples(uris, words))
def test_two_cloudevents_share_an_id_only_if_source_and_id_are_the_same(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    ids = [identify(message({"ce-source": source, "ce-id": event_id})) for source, event_id in (first, second)]
    assert (ids[0] == ids[1]) == (first == second)


def test_a_blank_in_a_cloudevents_source_does_not_shift_the_boundary() -> None:
    one = identify(message({"ce-source": "a b", "ce-id": "c"}))
    other = identify(message({"ce-source": "a", "ce-id": "b c"}))
    assert one != other
    assert " " not in one.removesuffix(" c")


def test_a_deduplication_id_that_sqs_derived_from_the_body_is_no_id() -> None:
    body = b'{"amount": 10}'
    derived = hashlib.sha256(body).hexdigest()
    assert identify(message({"sqs-deduplication-id": derived}, body)) == BROKER_ID
    assert identify(message({"sqs-deduplication-id": derived}, body + b" ")) == derived


def test_a_message_cannot_be_changed() -> None:
    received = Message("1", b"body")
    with pytest.raises(dataclasses.FrozenInstanceError):
        received.body = b"other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        received.headers["message-id"] = "2"  # type: ignore[index]


def test_text_and_json_read_the_body() -> None:
    received = Message("1", '{"name": "Zoë"}'.encode())
    assert received.text == '{"name": "Zoë"}'
    assert received.json() == {"name": "Zoë"}


def test_a_body_that_is_not_utf8_has_no_text() -> None:
    with pytest.raises(MalformedMessage, match="message m-1 is not UTF-8"):
        _ = Message("m-1", b"\xff").text


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xff", b"1" * 5_000, b"[" * 200_000],
    ids=["empty", "cut off", "not text", "a number too long for Python", "nested too deeply"],
)
def test_a_body_that_is_not_json_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedMessage, match="message m-1 is not JSON"):
        Message("m-1", body).json()


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=200))
def test_any_text_is_an_id(text: str) -> None:
    assert valid_message_id(text) == text


def test_the_longest_id_is_measured_in_bytes() -> None:
    longest = "é" * (MAX_MESSAGE_ID_BYTES // 2)
    assert valid_message_id(longest) == longest
    with pytest.raises(InvalidMessageId, match=f"has {MAX_MESSAGE_ID_BYTES + 1} bytes; at most {MAX_MESSAGE_ID_BYTES}"):
        valid_message_id(longest + "x")


@pytest.mark.parametrize(
    ("message_id", "why"),
    [("", "is empty"), ("a\0b", "holds a NUL character"), ("\ud800", "is not valid Unicode")],
)
def test_an_id_that_postgres_cannot_hold_is_refused(message_id: str, why: str) -> None:
    with pytest.raises(InvalidMessageId, match=why) as caught:
        valid_message_id(message_id)
    assert caught.value.message_id == message_id


@pytest.mark.parametrize("not_text", [None, 7, b"id", ["id"]])
def test_an_id_is_a_string(not_text: object) -> None:
    with pytest.raises(TypeError, match="a message id is a string, not"):
        valid_message_id(not_text)  # type: ignore[arg-type]


def test_a_fingerprint_is_the_sha256_of_the_body() -> None:
    assert fingerprint(b"body") == hashlib.sha256(b"body").digest()
    assert fingerprint("Zoë") == fingerprint("Zoë".encode())
    assert fingerprint(b"body") != fingerprint(b"body ")
