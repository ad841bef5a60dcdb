"""What a body is read as, and what the validator's words are when it cannot be."""

import builtins
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, computed_field, field_validator
from typing_extensions import TypedDict

from txbox import InvalidConfiguration, MalformedMessage, Message, TxboxError
from txbox.messages import MessageType
from txbox.messages.body import written


class Purchase(BaseModel):
    kind: Literal["purchase"] = "purchase"
    account: str
    cents: int
    ratio: float = 0
    at: datetime | None = None

    @field_validator("account")
    @classmethod
    def known(cls, account: str) -> str:
        if account.startswith("x"):
            raise ValueError(f"no account {account}")
        return account


class Refund(BaseModel):
    model_config = ConfigDict(strict=True)

    kind: Literal["refund"]
    cents: int


@dataclass
class Transfer:
    to: str
    amount: Decimal


class Note(TypedDict):
    text: str


Entry = Annotated[Purchase | Refund, Field(discriminator="kind")]


def read(of: Any, body: bytes | str) -> Any:
    return MessageType(of).read(Message("m-1", body.encode() if isinstance(body, str) else body))


@pytest.mark.parametrize(
    ("of", "body", "expected"),
    [
        (Purchase, '{"account": "a", "cents": 5}', Purchase(account="a", cents=5)),
        (
            Purchase,
            '{"account": "a", "cents": "5", "at": "2026-01-02T03:04:05Z", "more": {}}',
            Purchase(account="a", cents=5, at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ),
        (Transfer, '{"to": "NaN and Infinity", "amount": 1.10}', Transfer("NaN and Infinity", Decimal("1.1"))),
        (Transfer, '{"to": "a", "to": "b", "amount": "1e400"}', Transfer("b", Decimal("1e400"))),
        (Entry, '{"kind": "refund", "cents": 5}', Refund(kind="refund", cents=5)),
        (Purchase | Transfer, '{"to": "a", "amount": 1}', Transfer("a", Decimal(1))),
        (list[Transfer], '[{"to": "a", "amount": 1}]', [Transfer("a", Decimal(1))]),
        (Note, '{"text": "é"}', {"text": "é"}),
        (RootModel[dict[str, int]], '{"a": 1}', RootModel[dict[str, int]]({"a": 1})),
    ],
)
def test_bodies_are_read(of: Any, body: str, expected: Any) -> None:
    assert read(of, body) == expected


@pytest.mark.parametrize(
    ("of", "body", "words"),
    [
        (Purchase, "{}", "no Purchase: account: Field required; cents: Field required$"),
        (Purchase, '{"account": "secret", "cents": "secret"}', "no Purchase: cents: Input should be a valid integer"),
        (Purchase, '{"account": "xa", "cents": 1}', "account: Value error, no account xa$"),
        (Refund, '{"kind": "refund", "cents": "5"}', "no Refund: cents: Input should be a valid integer$"),
        (Entry, '{"kind": "gift"}', r"no Purchase \| Refund: Input tag 'gift' found using 'kind' does not match"),
        (Transfer, '{"to": "secret", "amount": "much"}', "no Transfer: amount: Input should be a valid decimal$"),
        (Transfer, '{"to": "secret", "amount": {}}{}', "Invalid JSON: trailing characters"),
        (list[Transfer], '[{"to": "a", "amount": 1}, {}]', r"no list\[Transfer\]: 1.to: Field required"),
        (Purchase, "", "Invalid JSON: EOF"),
        (Purchase, "secret", "Invalid JSON: expected value"),
        (Purchase, "17", "Input should be an object$"),
        (Purchase, b'{"account": "a", "cents": 1, "more": "\xff"}', "Invalid JSON: invalid unicode code point"),
        (Purchase, '{"account": "\\ud800", "cents": 1}', "Invalid JSON"),
        (Purchase, '{"account": "a", "cents": 1, "ratio": NaN}', "Invalid JSON: expected value"),
        (Purchase, '{"account": "a", "cents": 1, "more": [-Infinity]}', "Invalid JSON"),
        (Purchase, f'{{"account": "a", "cents": {"9" * 5_000}}}', "number out of range"),
        (Purchase, f'{{"account": "a", "cents": 1, "more": {"[" * 100_000}', "recursion limit exceeded"),
    ],
)
def test_what_cannot_be_read_is_malformed_in_the_validators_words(of: Any, body: bytes | str, words: str) -> None:
    with pytest.raises(MalformedMessage, match=f"^the body of message m-1 is .*{words}") as caught:
        read(of, body)
    assert "secret" not in str(caught.value), "fields are named, and not their values"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__, "a traceback does not show the validator's error, which has the values"


def test_an_error_that_is_not_the_validators_is_not_the_messages() -> None:
    class Rated(BaseModel):
        rate: int = Field(default_factory=lambda: int("no rate today"))

    with pytest.raises(ValueError, match="no rate today") as caught:
        read(Rated, "{}")
    assert not isinstance(caught.value, MalformedMessage)


def test_the_validators_words_are_bounded() -> None:
    with pytest.raises(MalformedMessage, match=r"; 4.amount: Field required; 10 more$") as caught:
        read(list[Transfer], json.dumps([{}] * 10))
    assert len(str(caught.value)) < 2_500
    with pytest.raises(MalformedMessage, match=r"account: Value error, no account x+…$") as caught:
        read(Purchase, json.dumps({"account": "x" * 100_000, "cents": 1}))
    assert len(str(caught.value)) < 500
    with pytest.raises(MalformedMessage, match=r": 200,000 errors$"):
        read(list[Transfer], "[" + ",".join(["{}"] * 100_000) + "]")


class Arbitrary: ...


class Unfinished(BaseModel):
    parent: "Nowhere"  # type: ignore[name-defined] # noqa: F821 - on purpose


@pytest.mark.parametrize(
    ("of", "text"),
    [
        (bytes, "bytes is no message type.* take the Message"),
        (str, "str is no message type"),
        (Message, "Message is no message type"),
        (Message | None, "no message type"),
        (TypeVar("T"), "T is no message type"),
        (Arbitrary, r"Arbitrary is no message type that pydantic can read: it knows no \S+\.Arbitrary$"),
        (os.environ, "^a value of type _Environ is no message type that pydantic can read: it knows no such type$"),
        (list[Arbitrary], r"list\[Arbitrary\] is no message type that pydantic can read"),
        (Unfinished, "Unfinished is no message type that pydantic can read: .*'Nowhere' is not defined"),
        (17, "a value of type int is no message type"),
    ],
)
def test_what_is_no_message_type_is_refused(of: Any, text: str) -> None:
    with pytest.raises(InvalidConfiguration, match=text):
        MessageType(of)


def test_without_pydantic_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] in ("pydantic", "pydantic_core"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    for needs in (MessageType, lambda kind: written(kind("a", Decimal(1)))):
        with pytest.raises(InvalidConfiguration, match=r"Transfer needs pydantic.*pip install '\.\[typed\]'"):
            needs(Transfer)


def test_schemas_of_what_is_read_and_of_what_is_published() -> None:
    read_as = MessageType(Purchase).json_schema()
    assert read_as["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert read_as["title"] == "Purchase"
    assert read_as["required"] == ["account", "cents"]

    class Priced(Purchase):
        @computed_field
        def euros(self) -> float:
            return self.cents / 100

    assert "euros" not in MessageType(Priced).json_schema()["properties"]
    assert "euros" in MessageType(Priced).json_schema(published=True)["properties"]
    assert set(MessageType(Entry).json_schema()["discriminator"]["mapping"]) == {"purchase", "refund"}
    assert repr(MessageType(Entry)) == "MessageType(Purchase | Refund)"


def test_a_type_without_a_schema_says_so() -> None:
    class WithObject(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        item: Arbitrary

    with pytest.raises(TxboxError, match="WithObject has no JSON Schema: Cannot generate"):
        MessageType(WithObject).json_schema()
