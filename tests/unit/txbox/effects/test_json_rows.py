"""Rows: what is read from a body, and what is malformed. The cases are those of every road."""

import pytest

from support.effects import FIELDS, GOOD, MALFORMED
from txbox import MalformedMessage, Message
from txbox.effects.fields import read_fields
from txbox.effects.json_rows import RowReader

READER = RowReader(read_fields(FIELDS))


@pytest.mark.parametrize(("body", "row"), GOOD)
def test_a_row_has_the_text_of_each_value(body: str, row: dict[str, str | None]) -> None:
    read = READER.read(Message("m", body.encode()))
    assert dict(zip(read_fields(FIELDS), read, strict=True)) == {"currency": "EUR", **row} | {
        name: row.get(name, "EUR" if name == "currency" else None) for name in read_fields(FIELDS)
    }


@pytest.mark.parametrize("body", MALFORMED)
def test_what_is_malformed_says_so_without_the_value(body: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        READER.read(Message("m", body.encode("utf-8", "surrogatepass")))
    assert "secret" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_malformed() -> None:
    with pytest.raises(MalformedMessage, match="not UTF-8"):
        READER.read(Message("m", b'{"customer": {"id": "\xff"}}'))


def test_a_body_that_nests_without_end_is_malformed() -> None:
    with pytest.raises(MalformedMessage):
        READER.read(Message("m", b'{"x": ' + b"[" * 100_000))
