"""Conflicts in the database: constraints at commit, serialization failures, deadlocks, messages in flight elsewhere."""

import threading

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from support.postgres.statements import run
from support.txbox.events import Kept
from support.waiting import wait_until
from support.workers.business import ADD, Business, apply, once
from support.workers.memory_worker import at_work, delivery, make, messages, numbered, process, work_off
from txbox import DeadLetters, Inbox, Message, Outcome
from txbox.backoff import Backoff
from txbox.instrumentation import Contended, Retried
from txbox.status import read_status
from txbox_workers.memory_source import MemorySource
from txbox_workers.processing import deadlocks, guarded_transactions


def test_a_constraint_that_fails_at_commit_fails_its_message_only(engine: Engine, business: Business) -> None:
    run(
        engine,
        "CREATE TABLE shipment (account_id int CONSTRAINT shipment_account REFERENCES account "
        "DEFERRABLE INITIALLY DEFERRED)",
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
            both_have_read.wait(60)
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


@pytest.mark.parametrize("ids", ["a", "bc"])
def test_a_serialization_failure_at_the_commit_is_retried_too(engine: Engine, business: Business, ids: str) -> None:
    with engine.begin() as connection:
        for statement in (
            "CREATE SEQUENCE runs",
            (
                "CREATE FUNCTION again() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF nextval('runs') = 1 THEN "
                "RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END IF; RETURN NULL; END $$"
            ),
            (
                "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED "
                "FOR EACH ROW EXECUTE FUNCTION again()"
            ),
        ):
            connection.exec_driver_sql(statement)
    kept = Kept()
    work_off(MemorySource(messages(*ids)), engine, hooks=[kept], max_attempts=3)
    assert [(event.sqlstate, event.messages) for event in kept.of(Retried)] == [("40001", len(ids))]
    assert [kept.outcomes(message_id) for message_id in ids] == [[Outcome.PROCESSED]] * len(ids)
    assert business.applied() == once(ids)


def test_a_transaction_that_is_rolled_back_again_and_again_fails_its_message_after_six_runs(
    engine: Engine, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlocks, "RETRY_BACKOFF", Backoff(first_seconds=0, longest_seconds=0))
    kept, runs = Kept(), []

    def handle(session: Session, message: Message) -> None:
        runs.append(message.id)
        session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"))

    assert process(make(MemorySource(), engine, handle, hooks=[kept]), delivery("a")) == [("a-1", Outcome.FAILED)]
    assert len(runs) == 6
    assert [event.attempt for event in kept.of(Retried)] == [1, 2, 3, 4, 5]
    assert business.failing() == {"a": 1}


def test_two_workers_over_the_same_messages_and_rows_come_to_exact_totals(leveled: Engine, business: Business) -> None:
    def handle(session: Session, message: Message) -> None:
        account = session.execute(text("SELECT balance FROM account WHERE account_id = 1 FOR UPDATE"))
        session.execute(
            text("UPDATE account SET balance = :new WHERE account_id = 1"), {"new": account.scalar_one() + 1}
        )
        apply(session, message)

    same = numbered(60)
    sources = [MemorySource(same, batch_size=4), MemorySource(same[::-1], batch_size=3)]
    workers = [make(source, leveled, handle, threads=2) for source in sources]
    with at_work(*workers):
        assert all(source.wait_until_empty(40) for source in sources)
    assert business.balance() == 60
    assert business.applied() == once(message.id for message in same)
    assert business.letters() == {}


def test_a_deadlock_between_two_handlers_is_retried(
    engine: Engine, business: Business, caplog: pytest.LogCaptureFixture
) -> None:
    both_hold_one = threading.Barrier(2)
    kept = Kept()
    met: set[str] = set()

    def handle(session: Session, message: Message) -> None:
        accounts = (1, 2) if message.id == "a" else (2, 1)
        session.execute(ADD, {"account": accounts[0], "amount": 1})
        if message.id not in met:
            met.add(message.id)
            both_hold_one.wait(60)
        session.execute(ADD, {"account": accounts[1], "amount": 1})
        apply(session, message)

    sources = [MemorySource(messages("a")), MemorySource(messages("b"))]
    with at_work(*(make(source, engine, handle, hooks=[kept], max_attempts=1) for source in sources)):
        assert all(source.wait_until_empty(20) for source in sources)
    assert (business.balance(1), business.balance(2)) == (2, 2)
    assert business.applied() == once("ab")
    assert [event.sqlstate for event in kept.of(Retried)] == ["40P01"]
    (said,) = [record for record in caplog.records if "has conflicts with" in record.getMessage()]
    assert said.levelname == "WARNING"
    assert "1 deadlock on account" in said.getMessage()
    (conflict,) = read_status(engine).conflicts
    assert (conflict.subscriber_id, conflict.sqlstate, conflict.relation, conflict.conflicts) == (
        "billing",
        "40P01",
        "account",
        1,
    )


def test_workers_that_meet_in_every_batch_take_turns_and_come_to_exact_totals(
    leveled: Engine, business: Business
) -> None:
    """Each message updates both accounts, every second one in the other order."""
    kept = Kept()

    def handle(session: Session, message: Message) -> None:
        for account in (1, 2) if message.id[-1] in "02468" else (2, 1):
            session.execute(ADD, {"account": account, "amount": 1})
        apply(session, message)

    source = MemorySource(numbered(200))
    workers = [make(source, leveled, handle, threads=2, hooks=[kept], max_attempts=None) for _ in range(2)]
    with at_work(*workers):
        assert source.wait_until_empty(60)
    assert business.applied() == once(message.id for message in numbered(200))
    assert (business.balance(1), business.balance(2)) == (200, 200)
    assert len(kept.of(Contended)) <= 2 * len(workers), "once a minute each"


def test_a_turn_that_does_not_come_in_time_is_not_waited_for(
    engine: Engine, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_transactions, "TURN_SECONDS", 0.1)
    transactions = guarded_transactions.GuardedTransactions(engine)
    inbox = Inbox("billing")
    with transactions.open(turn=-7, then=inbox.recording({"a": b""}).step) as first:
        first.connection.execute(ADD, {"account": 1, "amount": 1})
        recording = inbox.recording({"b": b""})
        with transactions.open(turn=-7, then=recording.step) as second:
            assert second.answer.error is None
            assert inbox.recorded(second.connection, recording, second.answer).first == {"b"}, "recorded once more"
            second.connection.execute(ADD, {"account": 2, "amount": 1})
            assert second.connection.execute(text("SHOW lock_timeout")).scalar_one() == "0"
    assert (business.balance(1), business.balance(2)) == (1, 1)
    with engine.connect() as connection:
        assert set(connection.execute(text("SELECT message_id FROM processed_message")).scalars()) == {"a", "b"}


def test_transactions_in_turn_come_one_after_the_other(engine: Engine, business: Business) -> None:
    transactions = guarded_transactions.GuardedTransactions(engine)
    inside, most = 0, 0
    lock = threading.Lock()

    def take() -> None:
        nonlocal inside, most
        for _ in range(5):
            with transactions.open(turn=8) as opened:
                with lock:
                    inside += 1
                    most = max(most, inside)
                opened.connection.execute(ADD, {"account": 1, "amount": 1})
                with lock:
                    inside -= 1

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == 1
    assert business.balance(1) == 20


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


def test_a_lock_on_the_counts_of_conflicts_keeps_no_message_waiting(engine: Engine, business: Business) -> None:
    failed: set[str] = set()

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id not in failed:
            failed.add(message.id)
            session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"))

    with engine.connect() as other:
        other.exec_driver_sql("LOCK TABLE handler_conflict IN SHARE MODE")
        work_off(MemorySource(messages("a")), engine, handle)
    assert business.applied() == once("a")
