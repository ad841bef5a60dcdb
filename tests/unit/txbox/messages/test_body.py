"""Objects of message types as bodies: the same type reads them again."""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cached_property
from typing import Any, Generic, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    RootModel,
    SecretStr,
    computed_field,
    field_serializer,
    field_validator,
)

from txbox import InvalidConfiguration, Message, Outgoing
from txbox.messages import MessageType
from txbox.messages.body import written


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


class Reading(BaseModel):
    celsius: float | None
    note: str = ""


class Readings(BaseModel):
    by_place: dict[str, list[Reading]]


@dataclass
class PlainReading:
    celsius: float
    hidden: float | None = field(default=None, compare=False)


class Renamed(BaseModel):
    cents: int = Field(serialization_alias="amount", validation_alias="price")


class RenamedWithDefault(BaseModel):
    cents: int = Field(0, serialization_alias="amount")


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    net: int

    @computed_field  # type: ignore[prop-decorator] # as pydantic has it
    @property
    def gross(self) -> int:
        return self.net * 2


class Excluded(BaseModel):
    net: int
    token: str = Field(exclude=True)


@dataclass
class Seeded:
    seed: InitVar[int]
    value: int = 0

    def __post_init__(self, seed: int) -> None:
        self.value = seed


class Animal(BaseModel):
    name: str


class Dog(Animal):
    breed: str = "mutt"


class Cat(Animal):
    pass


class Kennel(BaseModel):
    animal: Animal


class Pets(BaseModel):
    pets: list[Animal | Cat]


class Login(BaseModel):
    user: str
    password: SecretStr


class Loose(BaseModel):
    values: dict[str, Any]


class Checked(BaseModel):
    cents: int

    @field_validator("cents")
    @classmethod
    def in_stock(cls, cents: int) -> int:
        if cents > 1:
            raise LookupError("no such article")
        return cents


INFINITE, NOT_A_NUMBER = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (Reading(celsius=INFINITE), "celsius would be another value"),
        (Reading(celsius=NOT_A_NUMBER), "celsius would be another value"),
        (Readings(by_place={"a.b": [Reading(celsius=1), Reading(celsius=-INFINITE)]}), "by_place.a.b.1.celsius would"),
        (PlainReading(INFINITE), "celsius: Input should be a valid number"),
        (PlainReading(1.0, hidden=NOT_A_NUMBER), "hidden would be another value"),
        (RootModel[list[float | None]]([1.0, INFINITE]), "root.1 would be another value"),
        (Renamed(price=1), "price: Field required"),
        (RenamedWithDefault(cents=1), "cents would be another value"),
        (Closed(net=1), "gross: Extra inputs are not permitted"),
        (Excluded(net=1, token="t"), "token: Field required"),
        (Seeded(1), "seed: Field required"),
        (Kennel(animal=Dog(name="Rex")), "animal would be another value"),
        (Pets(pets=[Cat(name="Tom"), Animal(name="Tom")]), "pets.0 would be another value"),
        (Login(user="ada", password=SecretStr("hunter2")), "password would be another value"),
        (Loose(values={"at": date(2026, 1, 2)}), "values.at would be another value"),
        (Loose(values={"1": {1: "a"}}), "values.1.1 would be another value"),
        (Loose(values={"sizes": {1, 2}}), "values.sizes would be another value"),
        (Checked.model_construct(cents=2), "LookupError: no such article"),
        (Reading.model_construct(note="a"), "celsius: Field required"),
    ],
    ids=str,
)
def test_what_its_type_would_not_read_again_is_refused_in_one_line(body: Any, why: str) -> None:
    with pytest.raises(TypeError) as caught:
        written(body)
    told = str(caught.value)
    assert told.startswith(f"this {type(body).__name__} cannot be a body: ")
    assert why in told
    assert "\n" not in told
    assert "hunter2" not in told


@dataclass(eq=False)
class Identical:
    value: int
    children: "list[Identical]"


class Marked(BaseModel):
    model_config = ConfigDict(extra="allow", ser_json_inf_nan="strings")
    values: Sequence[int | float]
    names: Mapping[str, int] = {}
    at: datetime = datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Zurich"))  # an hour that comes twice
    hidden: int = Field(0, exclude=True)
    _private: int = PrivateAttr(0)

    @computed_field  # type: ignore[prop-decorator] # as pydantic has it
    @property
    def now(self) -> datetime:
        return datetime.now(UTC)

    @cached_property
    def total(self) -> float:
        return sum(self.values)


class Revealed(BaseModel):
    password: SecretStr

    @field_serializer("password", when_used="json")
    def reveal(self, password: SecretStr) -> str:
        return password.get_secret_value()


T = TypeVar("T")


@dataclass
class Box(Generic[T]):
    content: T


@pytest.mark.parametrize(
    ("body", "travels"),
    [
        (Identical(1, [Identical(2, [])]), b'{"value":1,"children":[{"value":2,"children":[]}]}'),
        (Revealed(password=SecretStr("hunter2")), b'{"password":"hunter2"}'),
        (Box[date](date(2026, 1, 2)), b'{"content":"2026-01-02"}'),
        (Loose(values={"pair": (1, 2)}), b'{"values":{"pair":[1,2]}}'),
    ],
    ids=str,
)
def test_what_its_type_reads_again_travels_however_it_is_compared(body: Any, travels: bytes) -> None:
    assert written(body) == travels


def test_what_does_not_travel_may_differ() -> None:
    body = Marked(values=(1, 2.5, NOT_A_NUMBER, INFINITE), names={"a": 1}, hidden=7, more="1")  # type: ignore[call-arg]
    body._private = 3
    assert body.total != 0
    text = written(body)
    assert b'"values":[1,2.5,"NaN","Infinity"]' in text
    assert b'"more":"1"' in text
    assert b"hidden" not in text
