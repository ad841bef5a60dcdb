"""Message types: bodies are read before their handler, and what cannot be read is parked at once, alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, field_validator
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from support.txbox.events import Kept
from support.txbox.outbox import OWN
from support.waiting import wait_until
from support.workers import ledger_worker
from support.workers.business import APPLY, Business, once
from support.workers.memory_worker import at_work, make, process, work_off
from support.workers.paid import delivered, paid
from txbox import DeadLetter, DeadLetters, Inbox, Message, Outbox, Outcome
from txbox.instrumentation import Retried, Settled
from txbox.leases import Lease, PostgresLedger
from txbox.relay import FunctionPublisher, OutboxMessage, Relay
from txbox_workers.memory_source import MemorySource


class Purchase(BaseModel):
    account: int = 1
    amount: int
    notes: list[str] = []


@dataclass
class Refund:
    refunded: int


def pay(session: Session, purchase: Purchase, message: Message) -> None:
    session.execute(APPLY, {"id": message.id, "body": str(purchase.amount)})


def pay_all(session: Session, purchases: Sequence[Purchase], messages: Sequence[Message]) -> None:
    for purchase, message in zip(purchases, messages, strict=True):
        pay(session, purchase, message)


@pytest.fixture(params=["handler", "batch_handler", "message"])
def paying(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The options of a worker that pays, in each way."""
    return {
        "handler": {"handler": pay},
        "batch_handler": {"batch_handler": pay_all},
        "message": {"handler": pay, "transactions": "message"},
    }[request.param]


def test_what_is_malformed_is_parked_at_once_and_the_others_are_paid_together(
    leveled: Engine, business: Business, paying: dict[str, Any]
) -> None:
    kept = Kept()
    sent = [paid("a"), paid("b", "much"), Message("c", b"{"), paid("d", 4), Message("e", b"[]"), paid("f", 6)]
    work_off(MemorySource(sent), leveled, hooks=[kept], **paying)
    assert business.applied() == once("adf")
    assert business.recorded() == set("adf")
    assert business.letters() == dict.fromkeys("bce", "malformed")
    assert business.rows("SELECT attempts FROM dead_letter") == [1, 1, 1]
    (error,) = business.rows("SELECT error FROM dead_letter WHERE message_id = 'b'")
    assert error.startswith("MalformedMessage: the body of message b is no Purchase: amount: Input should be a valid")
    assert {event.outcome for event in kept.of(Settled) if event.message_id in "bce"} == {Outcome.DEAD}
    if "transactions" not in paying:
        assert len(business.rows("SELECT DISTINCT xmin::text FROM effect")) == 1, "in one transaction"


def test_a_duplicate_is_a_duplicate_whatever_its_body(
    leveled: Engine, business: Business, paying: dict[str, Any]
) -> None:
    """The database decides: what was processed is not parked, and what was parked is not processed."""
    worker = make(MemorySource(), leveled, **paying)
    process(worker, delivered(paid("a")), delivered(paid("b", "much")))
    again = [delivered(Message("a", b"{")), delivered(paid("b", "much")), delivered(paid("c"))]
    assert dict(process(worker, *again)) == {
        "a-1": Outcome.DUPLICATE,
        "b-1": Outcome.DEAD,
        "c-1": Outcome.PROCESSED,
    }
    assert process(worker, delivered(Message("a", b"{"), receive_count=5)) == [("a-5", Outcome.DUPLICATE)]
    assert process(worker, delivered(Message("s", b"{"), receive_count=2)) == [("s-2", Outcome.DEAD)], "a suspect"
    assert business.letters() == {"b": "malformed", "s": "malformed"}
    assert business.failing() == {}
    assert business.applied() == once("ac")


def test_the_fingerprint_is_of_the_body_as_it_came(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, pay, inbox=Inbox("billing", fingerprint=True))
    process(worker, delivered(Message("a", b'{"amount": 1}')))
    same, other = Message("a", b'{"amount": 1}'), Message("a", b'{"amount":1}')
    assert process(worker, delivered(same)) == [("a-1", Outcome.DUPLICATE)]
    assert process(worker, delivered(other)) == [("a-1", Outcome.MISMATCH)]


def test_a_letter_is_redriven_into_the_next_version_of_its_type(engine: Engine, business: Business) -> None:
    source = MemorySource([Message("a", b'{"refunded": 3}')])
    work_off(source, engine, pay)
    assert business.letters() == {"a": "malformed"}

    def take(session: Session, entry: Purchase | Refund, message: Message) -> None:
        session.execute(APPLY, {"id": message.id, "body": repr(entry)})

    (letter,) = DeadLetters(engine).list()
    DeadLetters(engine).redrive(letter.dead_letter_id or 0, partial(send_back, source))
    work_off(source, engine, take)
    assert business.order("body") == ["Refund(refunded=3)"]
    assert DeadLetters(engine).list() == []


def send_back(source: MemorySource, letter: DeadLetter) -> None:
    source.send(Message(letter.message_id, letter.body))


@pytest.mark.parametrize("ids", ["a", "bc"])
def test_a_transaction_that_is_run_again_gets_objects_that_no_run_has_changed(
    engine: Engine, business: Business, ids: str
) -> None:
    runs: list[str] = []

    def handle(session: Session, purchase: Purchase, message: Message) -> None:
        purchase.notes.append("seen")
        purchase.amount += 1
        runs.append(message.id)
        session.execute(APPLY, {"id": message.id, "body": f"{purchase.amount} {purchase.notes}"})
        if len(runs) <= 2:
            session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"))

    kept = Kept()
    work_off(MemorySource([paid(id_, 5) for id_ in ids]), engine, handle, hooks=[kept])
    assert len(kept.of(Retried)) == 2
    assert business.order("body") == ["6 ['seen']"] * len(ids)
    assert business.applied() == once(ids)


class Rated(Purchase):
    rates: ClassVar[dict[int, int]] = {}

    @field_validator("amount")
    @classmethod
    def rated(cls, amount: int) -> int:
        return cls.rates[amount]


def test_a_validator_that_breaks_has_failed_and_is_tried_again(engine: Engine, business: Business) -> None:
    Rated.rates.clear()

    def learn(event: object) -> None:
        if isinstance(event, Settled) and event.outcome is Outcome.FAILED:
            assert isinstance(event.error, KeyError)
            Rated.rates.update({1: 10, 2: 20})

    def handle(session: Session, purchase: Rated, message: Message) -> None:
        pay(session, purchase, message)

    work_off(MemorySource([paid("a"), paid("b", 2)]), engine, handle, hooks=[learn])
    assert sorted(business.order("body")) == ["10", "20"]
    assert business.letters() == {}


def test_without_dead_letters_of_ours_it_is_left_to_the_brokers_own_policy(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, pay, max_attempts=None)
    outcomes = dict(process(worker, delivered(paid("a", "much")), delivered(paid("b"))))
    assert outcomes == {"a-1": Outcome.FAILED, "b-1": Outcome.PROCESSED}
    assert business.letters() == {}


def test_a_group_goes_on_behind_a_letter_and_keeps_its_order(
    engine: Engine, business: Business, paying: dict[str, Any]
) -> None:
    worker = make(MemorySource(), engine, **paying)
    group = [delivered(each, group="g") for each in (paid("a"), paid("b", "much"), paid("c"), paid("d"))]
    assert [outcome for _, outcome in process(worker, *group)] == [
        Outcome.PROCESSED,
        Outcome.DEAD,
        Outcome.PROCESSED,
        Outcome.PROCESSED,
    ]
    assert business.order() == ["a", "c", "d"]


def test_with_ordered_what_follows_in_its_group_is_parked_behind_it(
    engine: Engine, business: Business, paying: dict[str, Any]
) -> None:
    worker = make(MemorySource(), engine, ordered=True, **paying)
    group = [delivered(each, group="g") for each in (paid("a"), paid("b", "much"), paid("c"))]
    process(worker, *group, delivered(paid("d"), group="other"))
    assert business.order() == ["a", "d"]
    assert business.letters() == {"b": "malformed", "c": "behind"}


# --- under leases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [False, True], ids=["ledger alone", "beside an inbox"])
def test_under_a_lease_it_is_parked_at_once_and_no_work_is_begun(
    engine: Engine, business: Business, beside: bool
) -> None:
    mails: list[tuple[str, int, int]] = []
    ledger = PostgresLedger("billing", engine=engine)

    def mail(purchase: Purchase, message: Message, lease: Lease) -> None:
        mails.append((message.id, purchase.amount, lease.attempt))

    def mail_and_pay(session: Session, purchase: Purchase, message: Message, lease: Lease) -> None:
        mail(purchase, message, lease)
        pay(session, purchase, message)

    source = MemorySource([paid("a", "much"), paid("b", 2), paid("a", "much")])
    inbox = {"inbox": Inbox("billing")} if beside else {}
    with at_work(ledger_worker.make(source, ledger, mail_and_pay if beside else mail, engine, **inbox)):
        assert source.wait_until_empty(30)
    assert mails == [("b", 2, 1)]
    assert business.letters() == {"a": "malformed"}
    assert business.applied() == once("b" if beside else "")
    assert business.rows("SELECT attempts FROM dead_letter") == [1]


# --- published --------------------------------------------------------------------------------------------------------


def test_what_one_service_publishes_the_handler_of_another_is_given(engine: Engine, business: Business) -> None:
    """Through outbox, relay and worker; and nothing of it, where the business transaction rolls back."""
    source, outbox = MemorySource(), Outbox()

    def arrive(message: OutboxMessage) -> None:
        source.send(Message(message.id, message.body, message.headers))

    with Session(engine) as session, session.begin():
        outbox.publish(session, OWN, Purchase(amount=5), message_id="a")
        outbox.publish(session, OWN, Refund(3), message_id="b")
    with Session(engine) as session:
        outbox.publish(session, OWN, Purchase(amount=7), message_id="c")
        with pytest.raises(TypeError, match="this Refund cannot be a body"):
            outbox.publish(session, OWN, Refund("much"), message_id="d")  # type: ignore[arg-type]

    def take(session: Session, entry: Purchase | Refund, message: Message) -> None:
        session.execute(APPLY, {"id": message.id, "body": repr(entry)})

    relay = Relay(engine, publishers={"own": FunctionPublisher(arrive)})
    with at_work(relay, make(source, engine, take)):
        wait_until(lambda: business.rows("SELECT 1 FROM effect HAVING count(*) = 2"))
    assert sorted(business.order("body")) == ["Purchase(account=1, amount=5, notes=[])", "Refund(refunded=3)"]
    assert business.applied() == once("ab")
