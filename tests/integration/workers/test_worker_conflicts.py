"""Conflicts in the database: constraints at commit, serialization failures, deadlocks, messages in flight elsewhere."""

import threading

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from support.business import ADD, Business, apply, once
from support.events import Kept
from support.memory_worker import at_work, make, messages, numbered, work_off
from support.waiting import wait_until
from txbox import DeadLetters, Inbox, Message, Outcome
from txbox.instrumentation import Retried
from txbox_workers.memory import MemorySource

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_a_constraint_that_fails_at_commit_fails_its_message_only(engine: Engine, business: Business) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE shipment (account_id int CONSTRAINT shipment_account REFERENCES account "
            "DEFERRABLE INITIALLY DEFERRED)"
        )

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        session.execute(text("INSERT INTO shipment VALUES (:id)"), {"id": 99 if message.id == "bad" else 1})

    work_off(MemorySource(messages("a", "bad", "c")), engine, handle, max_attempts=2)
    assert business.applied() == once("ac")
    assert business.recorded() == {"a", "c"}
    (letter,) = DeadLetters(engine).list()
    assert "shipment_account" in letter.error


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_serialization_failure_is_retried_and_never_read_as_a_duplicate(
    schema_url: str, business: Business, level: str
) -> None:
    engine = create_engine(schema_url, isolation_level=level, pool_size=10)
    both_have_read = threading.Barrier(2)
    kept = Kept()
    met: set[str] = set()

    def handle(session: Session, message: Message) -> None:
        balance = session.execute(text("SELECT balance FROM account WHERE account_id = 1")).scalar_one()
        if message.id not in met:
            met.add(message.id)
            both_have_read.wait(10)
        session.execute(text("UPDATE account SET balance = :new WHERE account_id = 1"), {"new": balance + 1})
        apply(session, message)

    sources = [MemorySource(messages("a")), MemorySource(messages("b"))]
    with at_work(*(make(source, engine, handle, hooks=[kept], max_attempts=1) for source in sources)):
        assert all(source.wait_until_empty(20) for source in sources)
    engine.dispose()
    assert business.balance() == 2
    assert business.applied() == once("ab")
    assert {event.sqlstate for event in kept.of(Retried)} == {"40001"}
    assert kept.outcomes("a") == kept.outcomes("b") == [Outcome.PROCESSED]


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_two_workers_over_the_same_messages_and_rows_come_to_exact_totals(
    schema_url: str, business: Business, level: str
) -> None:
    engine = create_engine(schema_url, isolation_level=level, pool_size=10)

    def handle(session: Session, message: Message) -> None:
        account = session.execute(text("SELECT balance FROM account WHERE account_id = 1 FOR UPDATE"))
        session.execute(
            text("UPDATE account SET balance = :new WHERE account_id = 1"), {"new": account.scalar_one() + 1}
        )
        apply(session, message)

    same = numbered(60)
    sources = [MemorySource(same, batch_size=4), MemorySource(same[::-1], batch_size=3)]
    workers = [make(source, engine, handle, threads=2) for source in sources]
    with at_work(*workers):
        assert all(source.wait_until_empty(40) for source in sources)
    engine.dispose()
    assert business.balance() == 60
    assert business.applied() == once(message.id for message in same)
    assert business.letters() == {}


def test_a_deadlock_between_two_handlers_is_retried(engine: Engine, business: Business) -> None:
    both_hold_one = threading.Barrier(2)
    kept = Kept()
    met: set[str] = set()

    def handle(session: Session, message: Message) -> None:
        accounts = (1, 2) if message.id == "a" else (2, 1)
        session.execute(ADD, {"account": accounts[0], "amount": 1})
        if message.id not in met:
            met.add(message.id)
            both_hold_one.wait(10)
        session.execute(ADD, {"account": accounts[1], "amount": 1})
        apply(session, message)

    sources = [MemorySource(messages("a")), MemorySource(messages("b"))]
    with at_work(*(make(source, engine, handle, hooks=[kept], max_attempts=1) for source in sources)):
        assert all(source.wait_until_empty(20) for source in sources)
    assert (business.balance(1), business.balance(2)) == (2, 2)
    assert business.applied() == once("ab")
    assert [event.sqlstate for event in kept.of(Retried)] == ["40P01"]


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_message_in_flight_elsewhere_does_not_pin_the_worker(engine: Engine, business: Business, ending: str) -> None:
    kept = Kept()
    source = MemorySource(messages("a", "held", "c"))
    with engine.connect() as elsewhere:
        Inbox("billing").record(elsewhere, "held")
        with at_work(make(source, engine, hooks=[kept], max_attempts=2)):
            # More deliveries than attempts are allowed: being in flight is no failure.
            wait_until(lambda: len(kept.outcomes("held")) >= 4, "handed back four times")
            assert set(kept.outcomes("held")) == {Outcome.IN_FLIGHT}
            assert business.applied() == once("ac"), "the neighbours were not kept waiting"
            getattr(elsewhere, ending)()
            assert source.wait_until_empty(20)
    assert business.applied() == once("ac" if ending == "commit" else ["a", "held", "c"])
    assert kept.outcomes("held")[-1] is (Outcome.DUPLICATE if ending == "commit" else Outcome.PROCESSED)
    assert business.letters() == {}
    assert business.failing() == {}
