"""What a function on Lambda answers: which messages of an event come again."""

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.aws.lambda_events import (
    FIFO_EVENT,
    NOTHING,
    STANDARD_EVENT,
    STANDARD_URL,
    Context,
    EventSourceMapping,
    again,
    failing,
    failing_for,
    item_id,
    of,
    record,
)
from support.aws.lambda_events import event as event_of
from support.aws.queues import held, send
from support.txbox.horizon import forget
from support.workers.business import APPLY, Business, apply, once
from txbox import DeadLetters, Inbox, Message, Outcome, SqlEffect, TxboxError
from txbox.instrumentation import Received, Settled
from txbox.leases import PostgresLedger
from txbox_aws.lambda_ import sqs_handler
from txbox_aws.lambda_.event_source import queue_url
from txbox_aws.sqs import redrive_to_queue

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


@dataclass
class Purchase:
    amount: int


@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_only_what_has_failed_comes_again(pool: Engine, business: Business, transactions: Any) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("c"), transactions=transactions)
    asked = of(["a", "b", "c", "d"])
    assert handle(asked, Context(30)) == failing(["c"])
    assert business.applied() == once("abd")
    assert business.recorded() == {"a", "b", "d"}
    assert business.failing() == {"c": 1}
    assert handle(again(asked, failing(["c"])), Context(30)) == failing(["c"])
    assert business.failing() == {"c": 2}


def test_the_documented_events(pool: Engine, business: Business) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=apply)
    for documented in (STANDARD_EVENT, FIFO_EVENT, STANDARD_EVENT, FIFO_EVENT):
        assert handle(documented, Context(30)) == NOTHING
    assert business.applied() == once([r["messageId"] for r in STANDARD_EVENT["Records"]] + ["1 1"])  # type: ignore[misc]


def test_copies_within_one_event(pool: Engine, business: Business) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("bad"))
    one = record("a")
    bad, copy = record("bad"), record("bad") | {"messageId": item_id("copy of bad")}
    asked = event_of(one, one, record("a"), bad, copy)
    assert handle(asked, Context(30)) == failing(["bad", "copy of bad"])
    assert business.applied() == once("a")
    assert business.failing() == {"bad": 1}, "the copy has not used up another attempt"


def test_records_with_one_handle_by_hand_are_told_apart(pool: Engine, business: Business) -> None:
    asked = event_of(*(record(name) | {"receiptHandle": "r"} for name in ("a", "bad", "c")))
    assert sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("bad"))(asked, Context(30)) == failing(
        ["bad"]
    )
    assert business.applied() == once("ac")


def test_an_effect_in_sql(pool: Engine, business: Business) -> None:
    """What cannot be read is parked, what fails comes again, and the rest is applied; each message once."""
    with pool.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE effect ADD CHECK (body <> 'bad')")
    effect = SqlEffect.of(
        "INSERT INTO effect (message_id, body) SELECT message_id, kind FROM fresh_event", fields="kind text not null"
    )
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, effect=effect)
    kinds = {"a": '{"kind": "good"}', "b": "no JSON", "c": '{"kind": "bad"}', "d": '{"kind": "good"}'}
    asked = event_of(*(record(id_, body) for id_, body in kinds.items()))
    for _ in range(2):
        assert handle(asked, Context(30)) == failing(["c"])
    assert business.applied() == once("ad")
    assert business.letters() == {"b": "malformed"}


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_whatever_a_handler_raises_fails_its_message_only(
    pool: Engine, business: Business, error: type[BaseException]
) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("b", error=error))
    assert handle(of("abc"), Context(30)) == failing("b")
    assert business.applied() == once("ac")


def test_an_interrupt_from_the_keyboard_is_not_kept_from_anybody(pool: Engine, business: Business) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("b", error=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        handle(of("abc"), None)
    assert business.applied() == Counter()


def test_a_message_that_cannot_be_read_is_parked_at_once(pool: Engine, business: Business) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=apply, envelope="json")
    assert handle(event_of(record("a", {"fine": True}), record("b", "{")), Context(30)) == NOTHING
    assert list(business.letters().values()) == ["malformed"]
    assert business.applied() == once("a")


def test_a_dead_letter_goes_back_to_its_queue(
    pool: Engine, business: Business, sqs: "SQSClient", make_queue: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue()
    mapping = EventSourceMapping(sqs, queue)
    send(sqs, queue, ["a"], tenant="t-1")
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("a"), max_attempts=1)
    assert mapping.poll(lambda event: handle(event, Context(30)))
    assert sum(held(sqs, queue).values()) == 0
    (letter,) = DeadLetters(pool).list()
    assert letter.source == queue_url(mapping.arn)
    DeadLetters(pool).redrive(letter.dead_letter_id or 0, lambda it: redrive_to_queue(it, client=sqs))
    well = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=apply)
    assert mapping.poll(lambda event: well(event, Context(30)))
    assert business.applied() == once("a")


def test_hooks_hear_what_becomes_of_each_delivery(pool: Engine, business: Business) -> None:
    heard: list[Any] = []
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("b"), hooks=[heard.append])
    handle(of("ab"), Context(30))
    (received,) = [it for it in heard if isinstance(it, Received)]
    assert received.message_ids == ("a", "b")
    assert received.source == STANDARD_URL
    settled = {it.message_id: (it.outcome, it.acked) for it in heard if isinstance(it, Settled)}
    assert settled == {"a": (Outcome.PROCESSED, True), "b": (Outcome.FAILED, False)}


def test_a_function_of_two_queues_parks_each_message_with_its_own(pool: Engine, business: Business) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("a", "b"), max_attempts=1)
    other = "arn:aws:sqs:eu-central-1:123456789012:other"
    assert handle(event_of(record("a"), record("b", arn=other)), Context(30)) == NOTHING
    sources = {letter.message_id: letter.source for letter in DeadLetters(pool).list()}
    assert sources == {"a": STANDARD_URL, "b": "https://sqs.eu-central-1.amazonaws.com/123456789012/other"}


def test_no_error_shows_what_a_message_holds(pool: Engine, engine: Engine, business: Business) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE dead_letter ADD CHECK (false)")
    secret = "4111-1111-1111-1111"
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("a"), max_attempts=1)
    with pytest.raises(TxboxError) as caught:
        handle(event_of(record("a") | {"body": secret}), Context(30))
    shown = "".join(traceback.format_exception(caught.value))
    assert "dead_letter" in shown
    assert secret not in shown


def test_message_types(pool: Engine, business: Business) -> None:
    """What is malformed is parked, and does not come again; the others are paid together."""

    def pay_all(session: Session, purchases: Sequence[Purchase], messages: Sequence[Message]) -> None:
        for purchase, message in zip(purchases, messages, strict=True):
            session.execute(APPLY, {"id": message.id, "body": str(purchase.amount)})

    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, batch_handler=pay_all)
    asked = event_of(record("a", {"amount": 1}), record("b", {"amount": "much"}), record("c", {"amount": 3}))
    assert handle(asked, Context(30)) == NOTHING
    assert handle(asked, Context(30)) == NOTHING
    assert business.applied() == once("ac")
    assert business.order("body") == ["1", "3"]
    assert business.letters() == {"b": "malformed"}


# --- what is too old to judge -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_a_message_that_was_forgotten_and_comes_again_is_parked_and_not_run(
    pool: Engine, business: Business, transactions: Any
) -> None:
    heard: list[Any] = []
    handle = sqs_handler(
        inbox=Inbox("billing"),
        engine=pool,
        handler=failing_for("c"),
        transactions=transactions,
        hooks=[heard.append],
    )
    assert handle(of("ab"), Context(30)) == NOTHING
    forget(pool, "a")
    heard.clear()
    young = [record(message_id, sent_at=datetime.now(UTC)) for message_id in "cd"]
    assert handle(event_of(record("a", receives=2), record("b"), *young), Context(30)) == failing("c")
    settled = {it.message_id: (it.outcome, it.acked) for it in heard if isinstance(it, Settled)}
    assert settled == {
        "a": (Outcome.EXPIRED, True),
        "b": (Outcome.DUPLICATE, True),
        "c": (Outcome.FAILED, False),
        "d": (Outcome.PROCESSED, True),
    }
    assert business.applied() == once("abd")
    assert business.letters() == {"a": "expired"}
    assert business.failing() == {"c": 1}
    assert handle(of("a"), Context(30)) == NOTHING, "it is parked once"
    assert len(DeadLetters(pool).list()) == 1


# --- FIFO queues: nothing overtakes what has failed -------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"transactions": "batch"}, {"transactions": "message"}, {"ordered": True}])
def test_fifo_stops_at_the_first_failure(pool: Engine, business: Business, options: dict[str, Any]) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("c"), **options)
    groups = {"a": "g-1", "b": "g-2", "c": "g-1", "d": "g-2", "e": "g-3"}
    asked = event_of(*(record(name, group=group) for name, group in groups.items()))
    answer = handle(asked, Context(30))
    assert answer == failing("cde"), "those of other groups too: Lambda asks for it"
    assert business.order() == ["a", "b"]
    assert business.failing() == {"c": 1}
    well = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=apply)
    assert well(again(asked, answer), Context(30)) == NOTHING
    assert business.order() == list("abcde")


def test_fifo_goes_on_after_a_dead_letter(pool: Engine, business: Business) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("b"), max_attempts=1)
    assert handle(of("abc", group="g"), Context(30)) == NOTHING
    assert business.order() == ["a", "c"]
    assert business.letters() == {"b": "failed"}


def test_fifo_with_a_ledger_stops_at_the_first_failure(pool: Engine, business: Business) -> None:
    seen = []

    def mail(message: Message) -> None:
        seen.append(message.id)
        if message.id == "b":
            raise ValueError("no")

    handle = sqs_handler(ledger=PostgresLedger("billing", engine=pool), handler=mail)
    assert handle(of("abcd", group="g"), Context(30)) == failing("bcd")
    assert seen == ["a", "b"]
