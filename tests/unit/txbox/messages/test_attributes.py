"""Bodies on their way through SQS and SNS: whatever goes in comes out."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from txbox import MalformedMessage
from txbox.messages.attributes import BodyEncoding, attributes, decoded, encoded, is_wire_text, wire_bytes


@given(st.binary() | st.text().map(str.encode))
@example(b"")
@example("\ufffe".encode())
@example(b"\r\n\t")
def test_every_body_comes_out_as_it_went_in(body: bytes) -> None:
    text, encoding = encoded(body)
    assert is_wire_text(text)
    assert decoded(text, encoding) == body


@pytest.mark.parametrize(
    ("body", "text", "encoding"),
    [
        (b'{"a": 1}', '{"a": 1}', BodyEncoding.PLAIN),
        ("Zoë 😀\r\n\t".encode(), "Zoë 😀\r\n\t", BodyEncoding.PLAIN),
        (b"", "-", BodyEncoding.EMPTY),
        (b"\x00", "AA==", BodyEncoding.BASE64),
        (b"\xff", "/w==", BodyEncoding.BASE64),
        ("\uffff".encode(), "77+/", BodyEncoding.BASE64),
        (b"\x1b[0m", "G1swbQ==", BodyEncoding.BASE64),
    ],
)
def test_what_may_travel_as_it_is_does(body: bytes, text: str, encoding: BodyEncoding) -> None:
    assert encoded(body) == (text, encoding)


def test_a_body_that_is_not_ours_is_its_text() -> None:
    assert decoded("AA==", None) == b"AA=="
    assert decoded("\ud800", None) == b"\xed\xa0\x80"


@pytest.mark.parametrize(
    ("text", "encoding", "why"),
    [
        *((text, "base64", "should be base64") for text in ("A", "not base64!", "é")),
        ("text", "zstd", "'zstd', which this version of txbox does not know"),
    ],
)
def test_what_cannot_be_decoded_is_malformed(text: str, encoding: str, why: str) -> None:
    with pytest.raises(MalformedMessage, match=why):
        decoded(text, encoding)


def test_our_attributes_win() -> None:
    assert attributes("m-1", {"a": "1", "message-id": "forged"}, BodyEncoding.EMPTY) == {
        "a": "1",
        "message-id": "m-1",
        "txbox-body": "empty",
    }


def test_size_is_that_of_body_and_of_name_type_and_value_of_each_attribute() -> None:
    assert wire_bytes("é", {}) == 2
    assert wire_bytes("é", {"a": "12", "é": "3"}) == 2 + (1 + 6 + 2) + (2 + 6 + 1)
