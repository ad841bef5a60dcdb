"""What handlers are given, by their annotations: looked up once, when a worker is made, and never guessed."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NewType, TypeAlias

import pytest
from pydantic import BaseModel, Field
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import txbox
from txbox import Inbox, InvalidConfiguration, Message
from txbox.leases import Lease, PostgresLedger, idempotent
from txbox_aws.lambda_.deadline import Deadline, timed, timed_batch
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

if TYPE_CHECKING:
    from nowhere import Hidden  # type: ignore[import-not-found]

ENGINE = create_engine("postgresql+psycopg://nowhere")
LEDGER = PostgresLedger("billing", engine=ENGINE)
Beside: TypeAlias = Message


class Purchase(BaseModel):
    cents: int


@dataclass
class Refund:
    cents: int


Entry = Annotated[Purchase | Refund, Field(title="entry")]


def plain(session: Session, message: Message) -> None: ...
def quoted(session: Hidden, message: txbox.Message) -> None: ...
def unsaid(session, message): ...  # type: ignore[no-untyped-def]
def anything(session: Any, message: Any) -> None: ...
def any_object(session: Any, message: object, more: int = 0) -> None: ...
def of_purchase(session: Hidden, purchase: Purchase) -> Hidden: ...
def of_refund(session: Session, refund: Refund, /) -> None: ...
def of_entry(session: Session, entry: Entry) -> None: ...
def of_list(session: Session, purchases: list[Purchase]) -> None: ...
def both(session: Session, purchase: Purchase, message: Beside) -> None: ...
def both_and_lease(session: Session, purchase: Purchase, message: Message, lease: Lease) -> None: ...
def with_lease(session: Session, purchase: Purchase, lease: Lease) -> None: ...
def alone(purchase: Purchase) -> None: ...
def alone_both(purchase: Purchase, message: Message, *, lease: Lease) -> None: ...
def batch(session: Session, messages: Sequence[Message]) -> None: ...
def batch_unsaid(session: Session, messages: Sequence, more: dict[str, int] | None = None) -> None: ...  # type: ignore[type-arg]
def batch_of(session: Session, purchases: Iterable[Purchase]) -> None: ...
def batch_both(session: Session, entries: list[Entry], messages: Sequence[Message]) -> None: ...


class Handlers:
    def method(self, session: Session, purchase: Purchase) -> None: ...

    def __call__(self, session: Session, purchase: Purchase, message: Message) -> None: ...


def made(handler: Any, *, alone: bool = False, ledger: bool = False, batches: bool = False) -> tuple[str, bool]:
    """What a worker gives a handler: the name of its message type, and whether the message, too."""
    options: dict[str, Any] = {} if alone else {"inbox": Inbox("billing"), "engine": ENGINE}
    if alone or ledger:
        options["ledger"] = LEDGER
    worker = Worker(MemorySource(), **options, **{"batch_handler" if batches else "handler": handler})
    arguments = worker._options.arguments
    assert worker.message_type is arguments.message_type
    return getattr(arguments.message_type, "name", ""), arguments.with_message


Renamed = NewType("Renamed", Message)


def renamed(session: Session, message: Renamed) -> None: ...


def renamed_batch(session: Session, messages: Sequence[Renamed]) -> None: ...


def of_text_or_none(session: Session, body: str | None) -> None: ...


def of_annotated_text(session: Session, body: Annotated[str, Field(title="body")]) -> None: ...


def test_another_name_of_the_message_is_the_message() -> None:
    assert made(renamed) == ("", False)
    assert made(renamed_batch, batches=True) == ("", False)


@pytest.mark.parametrize("handler", [plain, quoted, unsaid, anything, any_object, print, lambda *both: None])
def test_a_handler_of_messages_is_given_messages_as_before(handler: Any) -> None:
    assert made(handler) == ("", False)


def test_message_may_be_imported_for_the_type_checker_only() -> None:
    for annotation in ("Message", "'Message'", "txbox.Message", "Sequence[Message]", "Sequence['Message']"):
        handler = defined(f"session: Hidden, message: {annotation}")
        assert made(handler, batches="[" in annotation) == ("", False), annotation


def test_what_is_imported_for_the_type_checker_only_keeps_no_handler_from_its_lease() -> None:
    assert made(defined("session: Hidden, message, *, lease: Lease"), ledger=True) == ("", False)
    for annotation in ("Hidden", "list[Hidden]"):
        with pytest.raises(InvalidConfiguration, match=rf"{re.escape(repr(annotation))} cannot be .*TYPE_CHECKING"):
            made(defined(f"session, hidden: {annotation}"))


def defined(parameters: str) -> Any:
    """A function whose annotations name what is not imported; since Python 3.14 they need no future to be let alone."""
    names: dict[str, Any] = {"Sequence": Sequence}
    future = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
    exec(compile(f"{future}def handler({parameters}): ...", "handlers.py", "exec", dont_inherit=True), names)
    return names["handler"]


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (of_purchase, ("Purchase", False)),
        (of_refund, ("Refund", False)),
        (of_entry, ("Purchase | Refund", False)),
        (of_list, ("list[Purchase]", False)),
        (both, ("Purchase", True)),
        (Handlers().method, ("Purchase", False)),
        (Handlers(), ("Purchase", True)),
        (functools.partial(both), ("Purchase", True)),
        (timed(both, Deadline(1)), ("Purchase", True)),
        (idempotent(both_and_lease, ledger=LEDGER), ("Purchase", True)),
    ],
)
def test_an_annotation_is_a_message_type(handler: Any, expected: tuple[str, bool]) -> None:
    assert made(handler) == expected


def test_beside_a_lease() -> None:
    assert made(with_lease, ledger=True) == ("Purchase", False)
    assert made(both_and_lease, ledger=True) == ("Purchase", True)
    assert made(alone, alone=True) == ("Purchase", False)
    assert made(alone_both, alone=True) == ("Purchase", True)


def test_batches() -> None:
    assert made(batch, batches=True) == made(batch_unsaid, batches=True) == ("", False)
    assert made(batch_of, batches=True) == ("Purchase", False)
    assert made(batch_both, batches=True) == ("Purchase | Refund", True)
    assert made(timed_batch(batch_both, Deadline(1)), batches=True) == ("Purchase | Refund", True)


def hidden(session: Session, message: Hidden) -> None: ...
def hidden_in_a_list(session, messages): ...  # type: ignore[no-untyped-def]


hidden_in_a_list.__annotations__["messages"] = list["Hidden"]


def of_text(session: Session, body: str) -> None: ...
def of_session(session: Session, other: Session) -> None: ...
def twice(session: Session, message: Message, again: Message) -> None: ...
def third(session: Session, purchase: Purchase, refund: Refund) -> None: ...
def not_a_type(session: Session, message: "what it is") -> None: ...  # type: ignore[valid-type]  # noqa: F722
def one_of_a_batch(session: Session, purchase: Purchase) -> None: ...


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (hidden, r"^Worker.handler, parameter message: its annotation 'Hidden' cannot be looked up .*TYPE_CHECKING"),
        (hidden_in_a_list, "'Hidden' is not defined"),
        (of_text, "parameter body: str is no message type.* take the Message, and its body or text"),
        (of_text_or_none, "is no message type.* take the Message"),
        (of_annotated_text, "is no message type.* take the Message"),
        (of_session, "parameter other: Session is no message type that pydantic can read"),
        (twice, "parameter message: it takes the message, and again would be it again"),
        (third, r"is called with \(session, message\) here, and third takes"),
        (not_a_type, "is no type"),
    ],
)
def test_what_cannot_be_given_is_refused_when_the_worker_is_made(handler: Any, text: str) -> None:
    with pytest.raises(InvalidConfiguration, match=text):
        made(handler)


def test_a_handler_of_batches_takes_a_sequence() -> None:
    with pytest.raises(
        InvalidConfiguration, match=r"batch_handler, parameter purchase: .*such as Sequence\[Purchase\]"
    ):
        made(one_of_a_batch, batches=True)


def test_a_handler_alone_has_no_session() -> None:
    with pytest.raises(InvalidConfiguration, match=r"is called with \(message\) here"):
        made(of_purchase, alone=True)
