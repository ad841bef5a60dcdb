"""Processed or parked, never both: two connections at every step of each other, decided by the primary key."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from support.postgres.blocking import backend_pid
from support.postgres.statements import run
from support.txbox.events import Kept
from support.waiting import wait_until
from support.workers.business import Business, apply, once
from support.workers.handlers import failing_always
from support.workers.memory_worker import at_work, delivery, make, messages, process
from txbox import (
    DeadLetter,
    DeadLetters,
    Failures,
    Inbox,
    InFlight,
    LetterNotFound,
    MalformedMessage,
    Message,
    Outcome,
    Reason,
)
from txbox_workers.delivery import Delivery
from txbox_workers.memory_source import MemorySource
from txbox_workers.processing import inbox_processor


def letter(message_id: str = "a", body: bytes | None = None) -> DeadLetter:
    body = f"body of {message_id}".encode() if body is None else body
    return DeadLetter("billing", message_id, Reason.FAILED, "ValueError: no", 3, "queue", body)


def worker(engine: Engine, handler: Any = apply, **options: Any) -> Any:
    return make(MemorySource(), engine, handler, inbox=Inbox("billing", wait_seconds=20), **options)


def never_both(business: Business) -> None:
    """What the tables say, asked without the code under test: no id is processed while a letter of it waits."""
    both = """SELECT message_id FROM dead_letter JOIN processed_message USING (subscriber_id, message_id)
        WHERE redriven_at IS NULL AND reason <> 'mismatch' AND processed_message.dead_letter_id IS NULL"""
    assert business.rows(both) == []
    waiting = set(
        business.rows("SELECT message_id FROM dead_letter WHERE redriven_at IS NULL AND reason <> 'mismatch'")
    )
    assert not waiting & set(business.applied())
    assert waiting == set(business.rows("SELECT message_id FROM processed_message WHERE dead_letter_id IS NOT NULL"))


def wait_for_waiter(business: Business, on: Connection) -> None:
    sql = f"SELECT pid FROM pg_stat_activity WHERE {backend_pid(on)} = ANY(pg_blocking_pids(pid))"
    wait_until(lambda: business.rows(sql), "the other one waits")


def record_and_apply(connection: Connection, message_id: str = "a") -> None:
    assert Inbox("billing").record(connection, message_id)
    apply(Session(bind=connection, join_transaction_mode="rollback_only"), delivery(message_id).message)


# --- who parks while the message is processed ------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False])
def test_who_parks_waits_for_the_transaction_that_processes_the_message(
    leveled: Engine, business: Business, pool: ThreadPoolExecutor, commits: bool
) -> None:
    letters = DeadLetters(leveled)
    with leveled.connect() as running:
        record_and_apply(running)
        parked: Future[int | None] = pool.submit(letters.park, letter(), wait_seconds=20)
        wait_for_waiter(business, running)
        running.commit() if commits else running.rollback()
    number = parked.result(20)
    assert (number is None) is commits
    assert business.applied() == once("a" if commits else "")
    assert set(business.letters()) == (set() if commits else {"a"})
    never_both(business)


def test_who_parks_does_not_wait_for_ever(leveled: Engine, business: Business) -> None:
    with leveled.connect() as running:
        record_and_apply(running)
        with pytest.raises(InFlight):
            DeadLetters(leveled).park(letter(), wait_seconds=0.05)
        running.commit()
    assert business.letters() == {}
    assert DeadLetters(leveled).park(letter()) is None
    assert business.letters() == {}
    never_both(business)


def test_what_is_parked_before_the_message_is_recorded_is_not_run(leveled: Engine, business: Business) -> None:
    DeadLetters(leveled).park(letter())
    assert process(worker(leveled), delivery("a")) == [("a-1", Outcome.DEAD)]
    assert process(worker(leveled), delivery("a", receive_count=2)) == [("a-2", Outcome.DEAD)]
    both = process(worker(leveled), delivery("a"), delivery("b"))
    assert both == [("a-1", Outcome.DEAD), ("b-1", Outcome.PROCESSED)]
    assert business.applied() == once("b")


def test_what_was_discarded_is_acked_and_never_run(leveled: Engine, business: Business) -> None:
    letters = DeadLetters(leveled)
    number = letters.park(letter())
    letters.discard(number or 0, note="no")
    for count in (1, 2):
        assert process(worker(leveled), delivery("a", receive_count=count)) == [(f"a-{count}", Outcome.DEAD)]
    assert process(worker(leveled), delivery("a"), delivery("b"))[0] == ("a-1", Outcome.DEAD)
    assert business.applied() == once("b")
    assert letters.list() == []
    assert [each.dead_letter_id for each in letters.list(redriven=True)] == [number], "no second letter of it"
    with leveled.begin() as connection:
        assert Inbox("billing").record(connection, "a") is False, "who calls record acks it"
    never_both(business)


@pytest.mark.parametrize("commits", [True, False])
def test_who_records_while_the_message_is_being_parked_waits_for_that(
    leveled: Engine, business: Business, pool: ThreadPoolExecutor, commits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parker is held between its marks and its commit."""
    marked, go_on = threading.Event(), threading.Event()
    letters = DeadLetters(leveled)
    forget = letters._forget_failures

    def held(connection: Connection, parked: DeadLetter) -> None:
        marked.set()
        assert go_on.wait(20)
        forget(connection, parked)
        if not commits:
            raise KeyError("the parker dies")

    monkeypatch.setattr(letters, "_forget_failures", held)
    parking = pool.submit(letters.park, letter())
    assert marked.wait(20)
    processing = pool.submit(process, worker(leveled), delivery("a"))
    business.wait_for_waiter()
    go_on.set()
    assert (parking.exception(20) is None) is commits
    assert processing.result(20) == [("a-1", Outcome.DEAD if commits else Outcome.PROCESSED)]
    never_both(business)


def test_two_copies_that_fail_for_the_last_time_are_parked_by_one_letter(
    leveled: Engine, business: Business, pool: ThreadPoolExecutor
) -> None:
    with ThreadPoolExecutor(8) as many:
        numbers = set(many.map(lambda _: DeadLetters(leveled).park(letter(), wait_seconds=20), range(16)))
    assert len(numbers) == 1
    assert business.letters() == {"a": "failed"}
    never_both(business)


# --- the worker's own last attempt -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_redelivery_during_the_last_attempt_parks_nothing_that_runs(
    leveled: Engine, business: Business, pool: ThreadPoolExecutor, ends_well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_processor, "JUST_BEGUN_SECONDS", 0.0)
    in_handler, go_on = threading.Event(), threading.Event()

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        in_handler.set()
        assert go_on.wait(20)
        if not ends_well:
            raise ValueError("no")

    running = pool.submit(process, worker(leveled, handle, max_attempts=1), delivery("a"))
    assert in_handler.wait(20)
    impatient = make(MemorySource(), leveled, inbox=Inbox("billing", wait_seconds=0.05), max_attempts=1)
    for count in (2, 3):
        assert process(impatient, delivery("a", receive_count=count)) == [(f"a-{count}", Outcome.IN_FLIGHT)]
    go_on.set()
    assert running.result(20) == [("a-1", Outcome.PROCESSED if ends_well else Outcome.DEAD)]
    late = process(worker(leveled, max_attempts=1), delivery("a", receive_count=4))
    assert late == [("a-4", Outcome.DUPLICATE if ends_well else Outcome.DEAD)]
    assert business.applied() == once("a" if ends_well else "")
    assert business.letters() == ({} if ends_well else {"a": "failed"})
    assert business.failing() == {}
    never_both(business)


def test_what_cannot_be_read_is_handed_back_while_its_message_is_processed(engine: Engine, business: Business) -> None:
    """It is parked without being recorded before; an ack would lose it, if the other transaction rolled back."""
    unreadable = replace(delivery("a"), problem=MalformedMessage("no"))
    impatient = make(MemorySource(), engine, inbox=Inbox("billing", wait_seconds=0.05))
    with engine.connect() as running:
        record_and_apply(running)
        assert process(impatient, unreadable) == [("a-1", Outcome.IN_FLIGHT)]
        running.commit()
    assert process(impatient, unreadable) == [("a-1", Outcome.DUPLICATE)]
    assert (business.letters(), business.failing()) == ({}, {})
    never_both(business)


def test_an_attempt_that_was_counted_just_now_is_not_taken_for_a_crash(engine: Engine, business: Business) -> None:
    """Another worker has counted it, and not begun its transaction yet."""
    attempt = Failures(engine, "billing").begin_attempt("a")
    assert attempt is not None
    assert process(make(MemorySource(), engine, max_attempts=1), delivery("a", receive_count=2)) == [
        ("a-2", Outcome.IN_FLIGHT)
    ]
    assert business.failing() == {"a": 1}
    assert business.letters() == {}


# --- another body, or none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fingerprint", [True, False])
@pytest.mark.parametrize("others", [(), ("b",)])
def test_another_body_under_an_id_that_is_parked_is_parked_too_and_neither_is_lost(
    leveled: Engine, business: Business, fingerprint: bool, others: tuple[str, ...]
) -> None:
    DeadLetters(leveled).park(letter())
    inbox = Inbox("billing", fingerprint=fingerprint)
    another = Delivery(Message("a", b"mended"), receipt="r", body=b"mended")
    outcomes = process(make(MemorySource(), leveled, inbox=inbox), another, *map(delivery, others))
    assert outcomes[0] == ("r", Outcome.MISMATCH)
    letters = DeadLetters(leveled)
    first, second = letters.list()
    assert (first.reason, first.body) == (Reason.FAILED, b"body of a")
    assert (second.reason, second.body) == (Reason.MISMATCH, b"mended")
    never_both(business)
    # Which of the two goes on, a person decides.
    letters.redrive(second.dead_letter_id or 0, lambda _: None)
    assert [(one.reason, one.body) for one in letters.list()] == [(Reason.MISMATCH, b"body of a")]
    assert process(make(MemorySource(), leveled, inbox=inbox), another) == [("r", Outcome.PROCESSED)]
    never_both(business)


def test_a_mismatch_says_nothing_of_the_message_whose_id_it_has(leveled: Engine, business: Business) -> None:
    inbox = Inbox("billing", fingerprint=True)
    process(make(MemorySource(), leveled, inbox=inbox), delivery("a"))
    another = Delivery(Message("a", b"another"), receipt="r", body=b"another")
    assert process(make(MemorySource(), leveled, inbox=inbox), another) == [("r", Outcome.MISMATCH)]
    assert business.recorded() == {"a"}
    assert business.letters() == {"a": "mismatch"}
    never_both(business)


# --- redrive ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False])
def test_who_is_given_the_copy_waits_for_the_redrive(
    leveled: Engine, business: Business, pool: ThreadPoolExecutor, commits: bool
) -> None:
    letters = DeadLetters(leveled)
    number = letters.park(letter()) or 0
    got: list[Future[list[tuple[str, Outcome]]]] = []

    def send(_: DeadLetter) -> None:
        got.append(pool.submit(process, worker(leveled), delivery("a", receipt="copy")))
        business.wait_for_waiter()
        if not commits:
            raise KeyError("the redrive dies after its send")

    if commits:
        letters.redrive(number, send)
    else:
        with pytest.raises(KeyError):
            letters.redrive(number, send)
    assert got[0].result(20) == [("copy", Outcome.PROCESSED if commits else Outcome.DEAD)]
    assert len(letters.list()) == (0 if commits else 1)
    never_both(business)


def test_a_letter_is_redriven_twice_and_its_copies_come_together(
    leveled: Engine, business: Business, pool: ThreadPoolExecutor
) -> None:
    """The first redrive dies after its send, so there are two copies."""
    letters = DeadLetters(leveled)
    number = letters.park(letter()) or 0

    def die(_: DeadLetter) -> None:
        raise KeyError("after the send")

    with pytest.raises(KeyError):
        letters.redrive(number, die)
    letters.redrive(number, lambda _: None)
    outcomes = [
        pool.submit(process, worker(leveled), delivery("a", receipt=receipt)) for receipt in ("copy 1", "copy 2")
    ]
    assert sorted(outcome for found in outcomes for _, outcome in found.result(20)) == [
        Outcome.DUPLICATE,
        Outcome.PROCESSED,
    ]
    never_both(business)


def test_a_copy_that_fails_before_its_redrive_has_committed_is_not_acked_for_the_letter_it_came_from(
    engine: Engine, business: Business
) -> None:
    letters, kept, source = DeadLetters(engine), Kept(), MemorySource(messages("a"))
    with at_work(make(source, engine, failing_always, max_attempts=2, hooks=[kept])):
        wait_until(lambda: len(kept.outcomes("a")) == 2, "hooks hear of a message after its ack")
        (parked,) = letters.list()

        def send(_: DeadLetter) -> None:
            source.send(messages("a")[0])
            wait_until(lambda: len(kept.outcomes("a")) > 2, "dealt with while the letter is locked and not marked")

        letters.redrive(parked.dead_letter_id, send)
        assert source.wait_until_empty(20)
    told = [outcome for outcome in kept.outcomes("a") if outcome is not Outcome.IN_FLIGHT]
    assert told == [Outcome.FAILED, Outcome.DEAD] * 2
    assert kept.outcomes("a")[2] is Outcome.IN_FLIGHT, "it waits for the redrive"
    (waiting,) = letters.list()
    assert waiting.dead_letter_id > parked.dead_letter_id
    assert business.applied() == {}


@pytest.mark.parametrize("body", [None, b"another"])
def test_letters_that_are_redriven_at_the_same_time_do_not_wait_in_a_circle(
    leveled: Engine, business: Business, body: bytes | None
) -> None:
    letters = DeadLetters(leveled)
    numbers = [letters.park(letter()) or 0, letters.park(letter(body=b"another")) or 0]
    together = threading.Barrier(2)

    def redrive(number: int) -> None:
        together.wait(60)
        letters.redrive(number, lambda _: None)

    with ThreadPoolExecutor(2) as both:
        for done in [both.submit(redrive, number) for number in numbers]:
            done.result(20)
    assert letters.list() == []
    never_both(business)


def test_a_letter_of_before_is_found_though_the_inbox_knows_no_fingerprint_of_it(
    engine: Engine, business: Business
) -> None:
    DeadLetters(engine).park(letter())
    run(engine, "UPDATE processed_message SET fingerprint = NULL")
    assert process(make(MemorySource(), engine), delivery("a")) == [("a-1", Outcome.DEAD)]


# --- all at once -----------------------------------------------------------------------------------------------------


def test_workers_copies_and_redrives_at_random_end_with_each_message_processed_or_parked(
    leveled: Engine, business: Business
) -> None:
    """Eight threads process and redrive copies of four messages that fail half of the time, at any interleaving."""
    ids = "abcd"
    counter = iter(range(10**6))
    lock = threading.Lock()

    def flaky(session: Session, message: Message) -> None:
        apply(session, message)
        with lock:
            fails = next(counter) % 3 != 0
        if fails:
            raise ValueError("this time")

    def once_more(number: int) -> None:
        mine = make(MemorySource(), leveled, flaky, inbox=Inbox("billing", wait_seconds=1), max_attempts=2)
        process(mine, delivery(ids[number % 4], receive_count=1 + number // 16, receipt=f"r{number}"))
        if number % 5 == 0:
            for waiting in DeadLetters(leveled).list():
                _unless_gone(
                    lambda waiting=waiting: DeadLetters(leveled).redrive(waiting.dead_letter_id, lambda _: None)
                )

    with ThreadPoolExecutor(8) as many:
        for done in [many.submit(once_more, number) for number in range(120)]:
            done.result(60)
    assert set(business.applied().values()) <= {1}
    never_both(business)


def _unless_gone(redrive: Callable[[], object]) -> None:
    with suppress(LetterNotFound):
        redrive()
