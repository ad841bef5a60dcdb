"""What becomes of the messages of a batch: one transaction, first-timers and duplicates, good ones beside a bad one."""

from collections.abc import Sequence

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from support.postgres.statements import statements_sent
from support.txbox.events import Kept
from support.workers.business import Business, apply, once
from support.workers.memory_worker import messages, numbered, work_off
from txbox import DeadLetters, Inbox, Message, Outcome
from txbox_workers.memory_source import MemorySource


@pytest.mark.usefixtures("without_reports")
def test_a_batch_is_one_record_and_one_commit(engine: Engine, business: Business) -> None:
    source = MemorySource(numbered(10), batch_size=10)
    with statements_sent(engine) as log:
        work_off(source, engine)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(DISTINCT xmin::text) FROM processed_message")).scalar_one() == 1
    assert log.count("COMMIT") == 1
    assert len([statement for statement in log if "INSERT INTO effect" in statement]) == 10
    assert not [statement for statement in log if "SAVEPOINT" in statement]
    assert business.order() == [message.id for message in numbered(10)]
    assert business.recorded() == {message.id for message in numbered(10)}


@pytest.mark.usefixtures("without_reports")
def test_one_transaction_per_message_on_request(engine: Engine, business: Business) -> None:
    source = MemorySource(numbered(5))
    with statements_sent(engine) as log:
        work_off(source, engine, transactions="message")
    assert log.count("COMMIT") == 5
    assert business.applied() == once(message.id for message in numbered(5))


def test_duplicates_within_a_batch_and_across_batches(engine: Engine, business: Business) -> None:
    source = MemorySource(messages("a", "b", "a", "c", "a", "b"), batch_size=6)
    worker = work_off(source, engine)
    assert business.applied() == once("abc")
    assert worker.counts == {Outcome.PROCESSED: 3, Outcome.DUPLICATE: 3}
    again = MemorySource(messages("c", "d", "a"))
    worker = work_off(again, engine)
    assert business.applied() == once("abcd")
    assert worker.counts == {Outcome.PROCESSED: 1, Outcome.DUPLICATE: 2}


def test_each_subscriber_processes_a_message_once(engine: Engine, business: Business) -> None:
    for subscriber in ("billing", "shipping", "billing"):
        work_off(MemorySource(messages("a", "b")), engine, inbox=Inbox(subscriber))
    assert business.applied() == {"a": 2, "b": 2}


def test_a_batch_handler_is_given_the_first_timers_of_a_batch_at_once(engine: Engine, business: Business) -> None:
    work_off(MemorySource(messages("b")), engine)
    calls: list[list[str]] = []

    def handle(session: Session, batch: Sequence[Message]) -> None:
        calls.append([message.id for message in batch])
        for message in batch:
            apply(session, message)

    work_off(MemorySource(messages("a", "b", "c", "a")), engine, batch_handler=handle)
    assert calls == [["a", "c"]]
    assert business.applied() == once("abc")


def test_a_batch_handler_that_fails_meets_its_messages_one_by_one(engine: Engine, business: Business) -> None:
    calls: list[list[str]] = []

    def handle(session: Session, batch: Sequence[Message]) -> None:
        calls.append([message.id for message in batch])
        for message in batch:
            apply(session, message)
            if message.id == "bad":
                raise ValueError("no")

    work_off(MemorySource(messages("a", "bad", "c")), engine, batch_handler=handle, max_attempts=2)
    assert calls[:4] == [["a", "bad", "c"], ["a"], ["bad"], ["c"]]
    assert business.applied() == once("ac")
    assert business.letters() == {"bad": "failed"}


def test_a_large_batch_that_fails_is_processed_in_tenths_and_those_too(engine: Engine, business: Business) -> None:
    """The one that fails is found by its part, and by the part of that."""
    calls: list[int] = []

    def handle(session: Session, batch: Sequence[Message]) -> None:
        calls.append(len(batch))
        for message in batch:
            apply(session, message)
            if message.id == "m0033":
                raise ValueError("no")

    sent = numbered(200)
    work_off(MemorySource(sent, batch_size=200), engine, batch_handler=handle, max_attempts=2)
    # All; the first twenty; the second twenty, which fail, by twos, of which one pair fails; the others, and
    # the one that fails, when it comes again.
    assert calls == [200, 20, 20, *[2] * 7, 1, 1, *[2] * 3, *[20] * 8, 1]
    assert business.order() == [message.id for message in sent if message.id != "m0033"]
    assert business.letters() == {"m0033": "failed"}


def test_the_good_ones_commit_and_only_the_bad_one_is_handed_back(engine: Engine, business: Business) -> None:
    attempts = []
    kept = Kept()

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id == "bad":
            attempts.append(business.failing().get("bad", 0))
            if len(attempts) < 4:
                raise ValueError("not yet")

    work_off(MemorySource(messages("a", "bad", "c")), engine, handle, hooks=[kept])
    assert business.applied() == once(["a", "bad", "c"])
    assert kept.outcomes("bad") == [Outcome.FAILED, Outcome.FAILED, Outcome.PROCESSED]
    assert kept.outcomes("a") == kept.outcomes("c") == [Outcome.PROCESSED]
    # The second run of the first delivery is no attempt of its own; from the second delivery on, attempts are counted
    # before they are made.
    assert attempts == [0, 0, 2, 3]
    assert business.failing() == {}
    assert business.letters() == {}


def test_the_same_id_with_another_body_is_parked_and_never_run(engine: Engine, business: Business) -> None:
    inbox = Inbox("billing", fingerprint=True)
    kept = Kept()
    source = MemorySource(
        [*messages("a"), Message("a", b"forged"), *messages("a", "b"), Message("b", b"other")], batch_size=10
    )
    work_off(source, engine, inbox=inbox, hooks=[kept])
    again = MemorySource([*messages("b", "c"), Message("a", b"forged later"), *messages("d")])
    work_off(again, engine, inbox=inbox, hooks=[kept])
    assert business.order("body") == [f"body of {id_}" for id_ in "abcd"]
    letters = {letter.body: letter for letter in DeadLetters(engine).list()}
    assert set(letters) == {b"forged", b"other", b"forged later"}
    assert {letter.reason for letter in letters.values()} == {"mismatch"}
    assert kept.outcomes("a").count(Outcome.MISMATCH) == 2
    assert kept.outcomes("a").count(Outcome.DUPLICATE) == 1
