"""Objects of message types as bodies: the same type reads them again."""

from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, RootModel, SecretStr

from txbox import InvalidConfiguration, Message, Outgoing
from txbox.message_types import MessageType
from txbox.message_types.body import written


class Item(BaseModel):
    article: str = Field(alias="articleNumber")
    count: int


class Order(BaseModel):
    id: UUID
    at: datetime
    items: list[Item]
    total: Decimal
    note: str | None = None


@dataclass
class Transfer:
    to: str
    amount: Decimal
    day: date


@settings(max_examples=25)  # what pydantic makes of values is its own matter
@given(
    st.builds(
        Order,
        id=st.uuids(),
        at=st.datetimes(timezones=st.just(UTC)),
        items=st.lists(st.builds(Item, articleNumber=st.text(), count=st.integers())),
        total=st.decimals(allow_nan=False, allow_infinity=False),
        note=st.none() | st.text(),
    )
    | st.builds(Transfer, st.text(), st.decimals(allow_nan=False, allow_infinity=False), st.dates())
)
def test_what_is_written_is_read_again(body: Any) -> None:
    assert MessageType(type(body)).read(Message("m-1", written(body))) == body


def test_fields_travel_under_their_aliases_and_root_models_as_their_root() -> None:
    assert written(Item(articleNumber="a", count=1)) == b'{"articleNumber":"a","count":1}'
    assert written(RootModel[list[int]]([1])) == b"[1]"
    assert written(Transfer("é", Decimal("1.10"), date(2026, 1, 2))).decode() == (
        '{"to":"é","amount":"1.10","day":"2026-01-02"}'
    )


@pytest.mark.parametrize(("body", "travels"), [("é", "é".encode()), (b"\xff", b"\xff"), (bytearray(b"a"), b"a")])
def test_text_and_bytes_travel_as_they_are(body: Any, travels: bytes) -> None:
    assert written(body) == travels


@pytest.mark.parametrize(
    "body", [{"a": 1}, [Item(articleNumber="a", count=1)], 7, None, Item, Transfer, object(), Message("m-1", b"")]
)
def test_what_is_no_body_is_refused_by_its_type(body: Any) -> None:
    with pytest.raises(TypeError, match="a body is bytes, text, or an object of a pydantic model or a dataclass, not"):
        written(body)


def test_a_value_that_is_not_of_its_fields_type_is_refused_and_not_sent() -> None:
    with pytest.raises(TypeError, match=r"this Transfer cannot be a body:(?s:.)*Expected `decimal`") as caught:
        written(Transfer("a" * 10_000, "x" * 10_000, date(2026, 1, 2)))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 1_100


def test_a_field_that_pydantic_cannot_write_is_refused() -> None:
    @dataclass
    class Holder:
        item: Outgoing | MessageType

    with pytest.raises(InvalidConfiguration, match="Holder is no message type that pydantic can read"):
        written(Holder(MessageType(Transfer)))


def test_secrets_travel_as_stars() -> None:
    class Login(BaseModel):
        password: SecretStr

    assert written(Login(password=SecretStr("hunter2"))) == b'{"password":"**********"}'
