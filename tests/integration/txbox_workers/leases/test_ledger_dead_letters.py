"""Dead letters of a worker with a ledger: which attempts count, and what is parked."""

from collections import Counter

import pytest
from sqlalchemy import Engine

from support.txbox.leases import acquired
from support.workers.business import once
from support.workers.ledger_worker import expire, make
from support.workers.memory_worker import at_work, delivery, messages, process
from txbox import DeadLetters, EffectUnknown, LedgerError, MalformedMessage, Message, Outcome
from txbox.dead_letters.failures import NO_OUTCOME
from txbox.leases import Lease, PostgresLedger
from txbox.messages.message import fingerprint
from txbox_workers.delivery import Delivery
from txbox_workers.memory_source import MemorySource


def redrive(engine: Engine) -> None:
    letters = DeadLetters(engine)
    (letter,) = letters.list()
    letters.redrive(letter.dead_letter_id or 0, lambda _: None)


def failing(_: Message) -> None:
    raise ValueError("no such address")


def test_a_failed_message_is_free_at_once_and_after_its_last_attempt_it_is_parked_whole(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    attempts = []

    def handle(message: Message, lease: Lease) -> None:
        if message.id == "bad":
            attempts.append((lease.attempt, lease.unknown_attempts))
            raise ValueError("no such address")
        mails.append(message.id)

    source = MemorySource(messages("a", "bad", "c"), name="queue-7")
    with at_work(make(source, ledger, handle, engine, max_attempts=3)):
        assert source.wait_until_empty(30)
    assert Counter(mails) == once("ac")
    assert attempts == [(1, 0), (2, 0), (3, 0)]
    (letter,) = DeadLetters(engine).list()
    assert (letter.subscriber_id, letter.message_id, letter.reason) == ("mailing", "bad", "failed")
    assert (letter.attempts, letter.source, letter.body) == (3, "queue-7", b"body of bad")
    assert letter.error == "ValueError: no such address"
    redrive(engine)
    process(make(MemorySource(), ledger, handle, engine), delivery("bad"))
    assert attempts[3:] == [(1, 0)], "a redriven letter begins anew"


def test_a_message_that_takes_its_process_down_is_parked_and_not_run_again(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    for _ in range(3):
        acquired(ledger, "deadly")
        expire(engine, "deadly")
    worker = make(MemorySource(), ledger, lambda m: mails.append(m.id), engine, max_attempts=3)
    assert process(worker, delivery("deadly", receive_count=4)) == [("deadly-4", Outcome.DEAD)]
    assert mails == []
    (letter,) = DeadLetters(engine).list()
    assert (letter.reason, letter.attempts, letter.error) == ("crashed", 3, NO_OUTCOME)
    # The ack was lost, and so was the release: it is found parked.
    for _ in range(3):
        acquired(ledger, "deadly")
        expire(engine, "deadly")
    assert process(worker, delivery("deadly", receive_count=5)) == [("deadly-5", Outcome.DEAD)]
    assert len(DeadLetters(engine).list()) == 1
    assert mails == []


def test_what_was_discarded_is_acked_and_never_run(engine: Engine, ledger: PostgresLedger, mails: list[str]) -> None:
    process(make(MemorySource(), ledger, failing, engine, max_attempts=1), delivery("bad"))
    (letter,) = DeadLetters(engine).list()
    DeadLetters(engine).discard(letter.dead_letter_id or 0, note="no")
    worker = make(MemorySource(), ledger, lambda message: mails.append(message.id), engine)
    for count in (1, 2):
        assert process(worker, delivery("bad", receive_count=count)) == [(f"bad-{count}", Outcome.DEAD)]
    assert mails == []
    assert DeadLetters(engine).list() == []


def test_without_an_engine_dead_letters_are_left_to_the_broker(ledger: PostgresLedger) -> None:
    worker = make(MemorySource(), ledger, failing, None, max_attempts=2)
    outcomes = [process(worker, delivery("x", receive_count=count))[0][1] for count in range(1, 6)]
    assert outcomes == [Outcome.FAILED] * 5
    lease = acquired(ledger, "x")
    assert (lease.attempt, lease.unknown_attempts) == (6, 0)


def test_another_body_under_the_same_id_is_parked_and_never_run(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    ledger.complete(acquired(ledger, "m", fingerprint=fingerprint(b"another body")))
    worker = make(MemorySource(), ledger, lambda m: mails.append(m.id), engine, fingerprint=True)
    assert process(worker, delivery("m")) == [("m-1", Outcome.MISMATCH)]
    (letter,) = DeadLetters(engine).list()
    assert (letter.reason, mails) == ("mismatch", [])
    unparked = make(MemorySource(), ledger, lambda m: mails.append(m.id), None, fingerprint=True)
    assert process(unparked, delivery("m")) == [("m-1", Outcome.FAILED)]
    careless = make(MemorySource(), ledger, lambda m: mails.append(m.id), None)
    assert process(careless, delivery("m")) == [("m-1", Outcome.DUPLICATE)]


def test_a_message_that_cannot_be_read_is_parked_at_once(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    worker = make(MemorySource(), ledger, lambda m: mails.append(m.id), engine, max_attempts=2)
    unreadable = Delivery(Message("x", b"{"), receipt="r", body=b"{", problem=MalformedMessage("not JSON"))
    assert process(worker, unreadable) == [("r", Outcome.DEAD)]
    (letter,) = DeadLetters(engine).list()
    assert (letter.reason, letter.attempts, mails) == ("malformed", 1, [])


def test_a_copy_of_a_parked_message_is_not_run_though_it_is_delivered_for_the_first_time(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    worker = make(MemorySource(), ledger, failing, engine, max_attempts=1)
    assert process(worker, delivery("x")) == [("x-1", Outcome.DEAD)]
    mended = make(MemorySource(), ledger, lambda m: mails.append(m.id), engine)
    assert process(mended, delivery("x", receipt="copy")) == [("copy", Outcome.DEAD)]
    assert mails == []


def test_a_redriven_letter_runs_though_no_release_of_it_has_succeeded(
    engine: Engine, ledger: PostgresLedger, mails: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease was not released when it was parked, nor when a copy was found to be parked."""

    def away(*_: object, **__: object) -> None:
        raise LedgerError("the store is away")

    worker = make(MemorySource(), ledger, failing, engine, max_attempts=1)
    with monkeypatch.context() as context:
        context.setattr(ledger, "release", away)
        for count in (1, 2, 3):
            assert process(worker, delivery("x", receive_count=count)) == [(f"x-{count}", Outcome.DEAD)]
            expire(engine, "x")
    redrive(engine)
    mended = make(MemorySource(), ledger, lambda m: mails.append(m.id), engine, max_attempts=1)
    assert process(mended, delivery("x")) == [("x-1", Outcome.PROCESSED)]
    assert mails == ["x"]


def test_who_has_lost_the_lease_parks_nothing(engine: Engine, ledger: PostgresLedger, mails: list[str]) -> None:
    """It was stopped in its last attempt; another worker, which allows more of them, has done the work meanwhile."""

    def fail_late(_: Message) -> None:
        expire(engine, "x")
        other = make(MemorySource(), ledger, lambda m: mails.append(m.id), engine, max_attempts=2)
        assert process(other, delivery("x", receive_count=2)) == [("x-2", Outcome.PROCESSED)]
        raise ValueError("too late")

    worker = make(MemorySource(), ledger, fail_late, engine, max_attempts=1)
    assert process(worker, delivery("x")) == [("x-1", Outcome.IN_FLIGHT)]
    assert (mails, DeadLetters(engine).list()) == (["x"], [])


def test_a_parked_message_whose_ack_was_lost_is_not_run_again(
    engine: Engine, ledger: PostgresLedger, mails: list[str]
) -> None:
    def handle(message: Message) -> None:
        mails.append(message.id)
        raise ValueError("no such address")

    worker = make(MemorySource(), ledger, handle, engine, max_attempts=2)
    outcomes = [process(worker, delivery("x", receive_count=count))[0][1] for count in range(1, 6)]
    assert outcomes == [Outcome.FAILED, Outcome.DEAD, Outcome.DEAD, Outcome.DEAD, Outcome.DEAD]
    assert mails == ["x", "x"]
    redrive(engine)
    assert process(worker, delivery("x", receive_count=6)) == [("x-6", Outcome.FAILED)], "redriven, it has its attempts"


def test_a_redriven_letter_whose_effect_may_have_happened_is_told_so(engine: Engine, ledger: PostgresLedger) -> None:
    seen = []

    def handle(message: Message, lease: Lease) -> None:
        seen.append((lease.attempt, lease.unknown_attempts))
        raise EffectUnknown("no answer")

    worker = make(MemorySource(), ledger, handle, engine, max_attempts=2)
    assert process(worker, delivery("x")) == [("x-1", Outcome.FAILED)]
    assert process(worker, delivery("x", receive_count=2)) == [("x-2", Outcome.DEAD)]
    redrive(engine)
    process(worker, delivery("x"))
    assert seen == [(1, 0), (2, 1), (1, 2)]
