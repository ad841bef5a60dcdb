"""Attempts: how they are counted, for suspects in advance, and when a message has had its last one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from support.postgres.blocking import backend_pid
from support.postgres.statements import run
from support.waiting import wait_until
from support.workers.business import Business, apply, once
from support.workers.handlers import failing_always, failing_first
from support.workers.memory_worker import at_work, delivery, make, messages, process, work_off
from txbox import DeadLetters, Failures, Inbox, Message, Outcome
from txbox.backoff import Backoff
from txbox.dead_letters.failures import NO_OUTCOME
from txbox.schema import tables
from txbox_workers.handlers import Handler
from txbox_workers.memory_source import MemorySource
from txbox_workers.processing import processor
from txbox_workers.processing.outage_errors import DatabaseUnavailable
from txbox_workers.worker import Worker


def test_after_its_last_attempt_a_message_is_parked_whole_and_acked(engine: Engine, business: Business) -> None:
    runs = []

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id == "bad":
            runs.append(message)
            raise ValueError("nul \0 and \N{SNOWMAN}") from KeyError("the cause")

    worker = work_off(MemorySource(messages("a", "bad", "c"), name="queue-7"), engine, handle, max_attempts=3)
    assert business.applied() == once("ac")
    assert business.recorded() == {"a", "c"}
    assert business.failing() == {}
    # Three deliveries, of which the first ran twice: in the batch, and alone.
    assert len(runs) == 4
    (letter,) = DeadLetters(engine).list()
    assert (letter.message_id, letter.body, letter.headers) == ("bad", b"body of bad", {"colour": "red"})
    assert (letter.reason, letter.attempts, letter.source) == ("failed", 3, worker.source.name)
    assert letter.error.startswith("ValueError: nul ")
    assert "KeyError: 'the cause'" in letter.error


def test_copies_in_one_batch_of_a_message_that_fails_are_one_attempt(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, failing_always, max_attempts=3)
    for count in (1, 2):
        outcomes = process(worker, *(delivery("x", receive_count=count, receipt=f"{count}-{n}") for n in range(10)))
        assert sorted(outcome for _, outcome in outcomes) == [Outcome.FAILED, *[Outcome.IN_FLIGHT] * 9]
    outcomes = process(worker, *(delivery("x", receive_count=3, receipt=f"3-{n}") for n in range(10)))
    assert {outcome for _, outcome in outcomes} == {Outcome.DEAD}
    assert business.failing() == {}
    (letter,) = DeadLetters(engine).list()
    assert letter.attempts == 3


def test_a_suspect_that_is_processed_elsewhere_while_it_waits_leaves_nothing_behind(
    engine: Engine, business: Business
) -> None:
    worker = make(MemorySource(), engine, inbox=Inbox("billing", wait_seconds=20))
    with engine.connect() as elsewhere:
        Inbox("billing").record(elsewhere, "a")
        outcomes: list[tuple[str, Outcome]] = []
        waiter = threading.Thread(target=lambda: outcomes.extend(process(worker, delivery("a", receive_count=5))))
        waiter.start()
        wait_until(business.failing, "counted in advance")
        elsewhere.commit()
    waiter.join(20)
    assert outcomes == [("a-5", Outcome.DUPLICATE)]
    assert business.failing() == {}


def test_an_attempt_is_taken_back_beside_that_of_a_copy_which_began_later(engine: Engine, business: Business) -> None:
    """Nothing had failed before the first attempt, so it has no error to put back: what the later one noted stays.

    For one message, which another transaction holds until the end::

        first worker     counts, waits                   loses its connection, takes back
        second worker                   counts, waits                                      processes
    """
    workers = [make(MemorySource(), engine, inbox=Inbox("billing", wait_seconds=60)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool, engine.connect() as elsewhere:
        Inbox("billing").record(elsewhere, "a")
        waits_for_it = f"SELECT pid FROM pg_stat_activity WHERE {backend_pid(elsewhere)} = ANY(pg_blocking_pids(pid))"
        first = pool.submit(process, workers[0], delivery("a", receive_count=3))
        (waiting,) = wait_until(lambda: business.rows(waits_for_it), "the first worker waits")
        second = pool.submit(process, workers[1], delivery("a", receive_count=3, receipt="copy"))
        wait_until(lambda: business.failing() == {"a": 2}, "the second worker has counted its attempt")
        business.rows(f"SELECT pg_terminate_backend({waiting})")
        with pytest.raises(DatabaseUnavailable):
            first.result(20)
        assert business.failing() == {"a": 1}, "the second worker's"
        assert business.rows("SELECT error FROM message_failure") == [NO_OUTCOME]
        elsewhere.rollback()
        assert second.result(20) == [("copy", Outcome.PROCESSED)]
    assert business.applied() == once("a")
    assert business.failing() == {}


@pytest.mark.parametrize("max_attempts", [1, 3, None])
def test_deliveries_alone_condemn_nobody_and_leave_nothing_behind(
    engine: Engine, business: Business, max_attempts: int | None
) -> None:
    """Hundreds of deliveries, in outages or beside a deadly message, and not one attempt."""
    worker = make(MemorySource(), engine, max_attempts=max_attempts)
    for count in (1, 2, 3, 500):
        assert process(worker, delivery(f"m{count}", receive_count=count)) == [(f"m{count}-{count}", Outcome.PROCESSED)]
    assert business.applied() == once(["m1", "m2", "m3", "m500"])
    assert business.failing() == {}


@pytest.mark.parametrize("max_attempts", [1, 2, 10])
def test_hand_backs_do_not_cost_a_message_its_attempts(engine: Engine, business: Business, max_attempts: int) -> None:
    """Delivered fifty times in an outage, or behind the first message of its group; then its handler fails."""
    worker = make(MemorySource(), engine, failing_always, max_attempts=max_attempts)
    outcomes = [
        outcome
        for count in range(50, 50 + max_attempts)
        for _, outcome in process(worker, delivery("a", receive_count=count))
    ]
    assert outcomes == [*[Outcome.FAILED] * (max_attempts - 1), Outcome.DEAD]
    (letter,) = DeadLetters(engine).list()
    assert (letter.reason, letter.attempts) == ("failed", max_attempts)
    assert letter.error == "ValueError: always"


def test_a_letter_that_could_not_be_parked_at_once_keeps_its_reason(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, failing_always, max_attempts=2)
    process(worker, delivery("a"))
    run(engine, "ALTER TABLE dead_letter RENAME TO elsewhere")
    with pytest.raises(DatabaseUnavailable):
        process(worker, delivery("a", receive_count=2))
    run(engine, "ALTER TABLE elsewhere RENAME TO dead_letter")
    assert process(worker, delivery("a", receive_count=3)) == [("a-3", Outcome.DEAD)]
    (letter,) = DeadLetters(engine).list()
    assert (letter.reason, letter.attempts, letter.error) == ("failed", 2, "ValueError: always")


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_letter_whose_ack_was_lost_is_not_attempted_again(
    engine: Engine, business: Business, max_attempts: int
) -> None:
    runs: list[str] = []

    def handle(session: Session, message: Message) -> None:
        runs.append(message.id)
        failing_always(session, message)

    worker = make(MemorySource(), engine, handle, max_attempts=max_attempts)
    for count in range(1, max_attempts + 1):
        process(worker, delivery("a", receive_count=count))
    assert business.letters() == {"a": "failed"}
    for count in range(max_attempts + 1, max_attempts + 4):
        assert process(worker, delivery("a", receive_count=count)) == [(f"a-{count}", Outcome.DEAD)]
    assert len(runs) == max_attempts
    assert len(DeadLetters(engine).list()) == 1


def test_an_attempt_that_was_taken_back_does_not_look_like_a_crash(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, failing_first("a"), max_attempts=3)
    assert process(worker, delivery("a", receive_count=2)) == [("a-2", Outcome.FAILED)]
    with engine.connect() as elsewhere:
        Inbox("billing").record(elsewhere, "a")
        assert process(worker, delivery("a", receive_count=3)) == [("a-3", Outcome.IN_FLIGHT)]
        elsewhere.rollback()
    assert process(worker, delivery("a", receive_count=4)) == [("a-4", Outcome.FAILED)]
    assert process(worker, delivery("a", receive_count=5)) == [("a-5", Outcome.PROCESSED)]


def test_without_a_last_attempt_the_broker_decides_when_it_is_enough(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, failing_always, max_attempts=None)
    for count in range(1, 16):
        assert process(worker, delivery("a", receive_count=count)) == [(f"a-{count}", Outcome.FAILED)]
    assert business.letters() == {}
    assert business.failing() == {"a": 15}


def delays(worker: Worker, *receive_counts: int) -> list[float]:
    return [
        settlement.delay_seconds
        for count in receive_counts
        for settlements in worker._processor.process([delivery("a", receive_count=count)])
        for settlement in settlements
    ]


def test_a_failed_message_waits_longer_after_each_attempt_and_never_quite_as_long_as_another(
    engine: Engine, business: Business
) -> None:
    backoff = Backoff(first_seconds=8, longest_seconds=20)
    workers = [
        Worker(MemorySource(), inbox=Inbox(name), engine=engine, handler=failing_always, backoff=backoff)
        for name in ("one", "another")
    ]
    waits = [delays(worker, 1, 2, 3, 4) for worker in workers]
    for first, second, third, fourth in waits:
        assert 4 <= first <= 8 <= second <= 16
        assert 10 <= third <= 20
        assert 10 <= fourth <= 20
    assert waits[0] != waits[1], "jitter"


def test_a_message_in_flight_elsewhere_waits_before_it_comes_again(
    engine: Engine, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "IN_FLIGHT_BACKOFF", Backoff(first_seconds=2, longest_seconds=60))
    worker = make(MemorySource(), engine, inbox=Inbox("billing", wait_seconds=0.05))
    with engine.connect() as elsewhere:
        Inbox("billing").record(elsewhere, "a")
        (wait,) = delays(worker, 1)
    assert 1 <= wait <= 2


def test_failures_and_letters_are_where_the_inbox_is(fresh_database: str) -> None:
    engine = create_engine(fresh_database)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA elsewhere")
        tables("elsewhere", "our_").metadata.create_all(connection)
    inbox = Inbox("billing", schema="elsewhere", prefix="our_")
    worker = Worker(MemorySource(), inbox=inbox, engine=engine, handler=refuse, max_attempts=2)
    assert process(worker, delivery("a")) == [("a-1", Outcome.FAILED)]
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT message_id FROM elsewhere.our_message_failure").all() == [("a",)]
    assert process(worker, delivery("a", receive_count=2)) == [("a-2", Outcome.DEAD)]
    (letter,) = DeadLetters(engine, schema="elsewhere", prefix="our_").list()
    assert letter.message_id == "a"
    engine.dispose()


def refuse(session: Session, message: Message) -> None:
    raise ValueError("no")


# --- what counts -----------------------------------------------------------------------------------------------------


def loses_connections(lost: int) -> tuple[list[int], Handler]:
    """A handler whose connection is ended by the server so many times, and then no more."""
    runs: list[int] = []

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        runs.append(len(runs))
        if len(runs) <= lost:
            session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    return runs, handle


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_lost_connections_are_no_attempts(engine: Engine, business: Business, max_attempts: int) -> None:
    runs, handle = loses_connections(max_attempts + 2)
    work_off(MemorySource(messages("a")), engine, handle, max_attempts=max_attempts)
    assert len(runs) == max_attempts + 3
    assert business.applied() == once("a")
    assert (business.letters(), business.failing()) == ({}, {})


def test_a_message_that_loses_its_connection_again_and_again_is_named_in_the_log_and_others_go_on(
    engine: Engine, business: Business, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id == "deadly":
            session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    source = MemorySource(messages("a", "deadly", "b"))
    with at_work(make(source, engine, handle, max_attempts=3)):
        wait_until(lambda: "in 6 deliveries" in caplog.text)
        source.send(messages("c")[0])
        wait_until(lambda: business.applied() == once("abc"))
    named = [record.getMessage() for record in caplog.records if "deliveries here" in record.getMessage()]
    assert named[0].startswith("billing: the connection to the database was lost in the handler of deadly in 5 ")
    assert not [line for line in named if "deadly" not in line]
    assert (business.letters(), business.failing()) == ({}, {})


def test_lost_connections_between_failures_leave_a_message_its_attempts(engine: Engine, business: Business) -> None:
    runs: list[int] = []

    def handle(session: Session, message: Message) -> None:
        runs.append(len(runs))
        if len(runs) % 2:
            session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
        raise ValueError(f"run {len(runs)}")

    work_off(MemorySource(messages("a")), engine, handle, max_attempts=3)
    assert len(runs) == 6
    (letter,) = DeadLetters(engine).list()
    assert (letter.reason, letter.attempts) == ("failed", 3)
    assert [entry["error"] for entry in letter.history] == [f"ValueError: run {run}" for run in (2, 4, 6)]


def test_an_attempt_that_could_not_be_taken_back_is_taken_back_once_the_database_is_there_again(
    engine: Engine, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, handle = loses_connections(1)
    worker = make(MemorySource(), engine, handle, max_attempts=1)
    with monkeypatch.context() as context:
        context.setattr(Failures, "take_back", refuse_connections)
        with pytest.raises(DatabaseUnavailable):
            process(worker, delivery("a"))
        assert business.failing() == {"a": 1}
        with pytest.raises(DatabaseUnavailable):
            worker._processor.check_recording()
    worker._processor.check_recording()
    assert business.failing() == {}
    assert process(worker, delivery("a", receive_count=2)) == [("a-2", Outcome.PROCESSED)]


def refuse_connections(*_: object) -> None:
    raise ConnectionError("the database is away")


def test_a_message_that_was_delivered_and_never_begun_has_all_of_its_attempts(
    engine: Engine, business: Business
) -> None:
    """Received twice in vain; then it takes its process down five times, of which five count."""
    failures = Failures(engine, "billing")
    for count in range(3, 8):
        attempt = failures.begin_attempt("a", receive_count=count)
        assert attempt.number == count - 2
    age_attempts(engine)
    assert process(make(MemorySource(), engine, max_attempts=5), delivery("a", receive_count=8)) == [
        ("a-8", Outcome.DEAD)
    ]
    (letter,) = DeadLetters(engine).list()
    assert (letter.reason, letter.attempts, letter.error) == ("crashed", 5, NO_OUTCOME)
    assert [entry["delivery"] for entry in letter.history] == [3, 4, 5, 6, 7]
    assert business.applied() == {}


def test_what_a_letter_and_the_log_say_of_attempts_is_what_became_of_each(
    engine: Engine, business: Business, caplog: pytest.LogCaptureFixture
) -> None:
    failing = make(MemorySource(), engine, failing_always, max_attempts=3)
    process(failing, delivery("a"))
    assert Failures(engine, "billing").begin_attempt("a", receive_count=2) is not None
    source = MemorySource()
    with at_work(make(source, engine, failing_always, max_attempts=3)):
        source.send(messages("a")[0])
        assert source.wait_until_empty(20)
    (letter,) = DeadLetters(engine).list()
    assert [(entry["delivery"], entry["error"]) for entry in letter.history] == [
        (1, "ValueError: always"),
        (2, NO_OUTCOME),
        (1, "ValueError: always"),
    ]
    assert all(entry["at"] for entry in letter.history)
    (said,) = [record.message for record in caplog.records if " dead a " in record.message]
    assert said.endswith(f": ValueError: always; what counted: deliveries 1, 1: this error; delivery 2: {NO_OUTCOME}")


def age_attempts(engine: Engine) -> None:
    """Have it be long ago that attempts were begun."""
    aged = """UPDATE message_failure SET history = (
        SELECT jsonb_agg(entry || jsonb_build_object('at', now() - interval '1 hour') ORDER BY place)
        FROM jsonb_array_elements(history) WITH ORDINALITY AS kept (entry, place))"""
    run(engine, aged)


# --- what cannot be read ---------------------------------------------------------------------------------------------


def reads_json(session: Session, message: Message) -> None:
    message.json()


def test_a_body_that_cannot_be_read_is_parked_at_once(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, reads_json)
    assert sorted(process(worker, delivery("a"), delivery("b"))) == [("a-1", Outcome.DEAD), ("b-1", Outcome.DEAD)]
    assert business.letters() == {"a": "malformed", "b": "malformed"}
    assert [letter.attempts for letter in DeadLetters(engine).list()] == [1, 1]
    assert business.failing() == {}
