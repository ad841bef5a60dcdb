"""The reports of workers, and pauses: who works, and that a pause is heeded at every moment of a worker's life."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, StaticPool, create_engine
from sqlalchemy.orm import Session

from support.aws.queues import send
from support.postgres.statements import run
from support.txbox.events import Kept
from support.waiting import wait_until
from support.workers import worker_process
from support.workers.business import Business, apply, once
from support.workers.handlers import Hanging
from support.workers.ledger_worker import make as make_with_ledger
from support.workers.memory_worker import at_work, feed, make, messages, numbered
from txbox import DeadLetters, Inbox, InvalidConfiguration, Message, Outcome
from txbox.instrumentation import Drained, Paused, Received, Resumed
from txbox.leases import PostgresLedger
from txbox.operations.pauses import find_named, pause, read_pauses, resume
from txbox.status import WorkerStatus, read_status
from txbox.status import workers as workers_status
from txbox_aws.sqs import SqsWorker
from txbox_workers import reporter
from txbox_workers.memory_source import MemorySource


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports every few milliseconds."""
    monkeypatch.setattr(reporter, "REPORT_SECONDS", 0.05)


class Grouped(MemorySource):
    """Delivers all that there is as one FIFO group, in the order of its numbers, whatever was handed back when."""

    def receive(self) -> Any:
        with self._condition:
            self._promote()
            self._ready = type(self._ready)(sorted(self._ready, key=lambda delivery: delivery.message.id))
            if self._taken:  # as SQS does: nothing of a group while some of it is in hand
                self._condition.wait(0.01)
                return []
        return [replace(delivery, group="g") for delivery in super().receive()]


def reported(engine: Engine) -> tuple[WorkerStatus, ...]:
    return read_status(engine).workers


def states(engine: Engine) -> list[str]:
    return [worker.state for worker in reported(engine)]


def test_a_worker_reports_what_it_has_done_and_signs_off(engine: Engine, business: Business) -> None:
    def handle(session: Session, message: Message) -> None:
        if message.id == "bad":
            raise ValueError("no")
        apply(session, message)

    source = MemorySource(messages("a", "b", "a", "bad"))
    with at_work(make(source, engine, handle, max_attempts=2, threads=2)):
        assert source.wait_until_empty(20)
        (worker,) = wait_until(lambda: [one for one in reported(engine) if one.outcomes.get("dead")])
        assert worker.outcomes == {"processed": 2, "duplicate": 1, "failed": 1, "dead": 1}
        assert (worker.subscriber_id, worker.source, worker.state) == ("billing", "memory", "working")
        assert not worker.stale
        assert worker.last_batch_at is not None
        assert worker.last_batch_at >= worker.started_at
        assert worker.source_retention_seconds is None
        wait_until(lambda: reported(engine)[0].per_second, "a rate is of a second at least")
        assert set(reported(engine)[0].per_second) == set(worker.outcomes)
    assert reported(engine) == ()


def test_deadlocks_and_other_conflicts_are_counted(engine: Engine, business: Business) -> None:
    failed: set[str] = set()

    def handle(session: Session, message: Message) -> None:
        if message.id not in failed:
            failed.add(message.id)
            code = "40P01" if message.id == "a" else "40001"
            session.connection().exec_driver_sql(f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{code}'; END $$")
        apply(session, message)

    source = MemorySource(messages("a", "b"), batch_size=1)
    with at_work(make(source, engine, handle)):
        assert source.wait_until_empty(20)
        (worker,) = wait_until(lambda: [one for one in reported(engine) if one.outcomes.get("processed") == 2])
    assert (worker.deadlocks, worker.retries) == (1, 2)


def test_a_worker_goes_on_while_it_cannot_report_and_says_so_once(
    engine: Engine, business: Business, caplog: pytest.LogCaptureFixture
) -> None:
    source = MemorySource()
    with at_work(make(source, engine)):
        wait_until(lambda: reported(engine))
        run(engine, "ALTER TABLE worker_report RENAME TO elsewhere")
        wait_until(lambda: "cannot report that it works" in caplog.text)
        feed(source, numbered(20))
        assert source.wait_until_empty(20)
        run(engine, "ALTER TABLE elsewhere RENAME TO worker_report")
        wait_until(lambda: reported(engine)[0].outcomes.get("processed") == 20)
    assert caplog.text.count("cannot report that it works") == 1
    assert business.applied() == once(message.id for message in numbered(20))


def test_a_worker_with_a_ledger_alone_reports_where_its_letters_are(engine: Engine) -> None:
    ledger = PostgresLedger("mailing", engine=engine)
    with at_work(make_with_ledger(MemorySource(), ledger, lambda _: None, engine)):
        (worker,) = wait_until(lambda: reported(engine))
    assert worker.subscriber_id == "mailing"


def test_a_pool_with_one_connection_for_all_is_left_to_the_handlers(schema_url: str) -> None:
    shared = create_engine(schema_url, poolclass=StaticPool)
    source = MemorySource(messages("a"))
    with at_work(make(source, shared, lambda *_: None)):
        assert source.wait_until_empty(20)
        assert reported(shared) == ()
    shared.dispose()


def test_reports_of_many_workers_at_once_do_not_meet(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "REPORT_SECONDS", 0.001)
    caught: list[str] = []
    monkeypatch.setattr(reporter.WorkerReporter, "_log_failure", lambda _, error: caught.append(str(error)))
    workers = [make(MemorySource(), engine) for _ in range(15)]
    with at_work(*workers), ThreadPoolExecutor(2) as others:

        def disturb(number: int) -> None:
            for _ in range(12):
                pause(engine, subscriber_id=f"other {number}", by="a test")
                resume(engine, subscriber_id=f"other {number}")

        list(others.map(disturb, range(2)))
        wait_until(lambda: len(reported(engine)) == 15)
    assert caught == []
    assert reported(engine) == ()


# --- pauses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_a_busy_worker_gives_its_pool_s_only_connection_to_a_report_between_two_transactions(
    engine: Engine, schema_url: str, monkeypatch: pytest.MonkeyPatch, transactions: str
) -> None:
    monkeypatch.setattr(reporter, "REPORT_SECONDS", 3600)
    monkeypatch.setattr(reporter, "GIVE_WAY_SECONDS", 30)
    seen: list[tuple[str, bool]] = []

    def handle(_: Session, message: Message) -> None:
        assert worker._reporter is not None
        connected = worker._reporter._connected
        if message.id == "a":
            worker._reporter.wake()
            wait_until(lambda: not connected.is_set(), "the report waits for this transaction's connection")
        seen.append((message.id, connected.is_set()))

    tight = create_engine(schema_url, pool_size=1, max_overflow=0)
    source = MemorySource(batch_size=1 if transactions == "batch" else 2)
    worker = make(source, tight, handle, transactions=transactions)
    with at_work(worker):
        wait_until(lambda: reported(engine))
        with source._condition:  # both at once
            feed(source, messages("a", "b"))
        assert source.wait_until_empty(20)
    assert seen == [("a", False), ("b", True)]
    tight.dispose()


def test_a_pause_is_heeded_by_all_workers_of_a_subscriber_and_by_no_other(engine: Engine, business: Business) -> None:
    kept = Kept()
    sources = [MemorySource(name=f"source {number}") for number in range(2)]
    other = MemorySource(name="other")
    workers = [make(source, engine, hooks=[kept], threads=2) for source in sources]
    workers.append(make(other, engine, inbox=Inbox("shipping")))
    with at_work(*workers):
        assert pause(engine, subscriber_id="billing", by="anna", note="the ledger is being repaired")
        assert not pause(engine, subscriber_id="billing", by="ben")
        wait_until(lambda: states(engine) == ["drained", "drained", "working"])
        assert [(one.paused_by, one.note) for one in kept.of(Paused)] == [("anna", "the ledger is being repaired")] * 2
        for source, message in zip((*sources, other), messages("a", "b", "c"), strict=True):
            source.send(message)
        assert other.wait_until_empty(20)
        assert not any(source.wait_until_empty(0.5) for source in sources), "nothing is received"
        assert business.applied() == once("c")
        assert kept.of(Received) == []
        assert resume(engine, subscriber_id="billing")
        assert not resume(engine, subscriber_id="billing")
        assert all(source.wait_until_empty(20) for source in sources)
        wait_until(lambda: states(engine) == ["working"] * 3)
    assert business.applied() == once("abc")
    for source in sources:
        told = [type(one) for one in kept.of(Paused, Drained, Resumed) if one.source == source.name]
        assert told == [Paused, Drained, Resumed]


def test_a_pause_lets_finish_what_is_begun_and_hands_back_the_rest_untouched(
    engine: Engine, business: Business
) -> None:
    handle, kept = Hanging("b"), Kept()
    source = Grouped(messages("a", "b", "c", "d"))
    with at_work(make(source, engine, handle, transactions="message", hooks=[kept])):
        assert handle.begun.wait(20)
        pause(engine, subscriber_id="billing", by="anna")
        wait_until(lambda: states(engine) == ["paused"])
        assert kept.of(Drained) == []
        handle.go.set()
        wait_until(lambda: states(engine) == ["drained"])
        assert business.order() == ["a", "b"]
        assert (kept.outcomes("c"), kept.outcomes("d")) == ([Outcome.IN_FLIGHT], [Outcome.IN_FLIGHT])
        assert business.failing() == {}, "it was no attempt"
        resume(engine, subscriber_id="billing")
        assert source.wait_until_empty(20)
    assert business.order() == ["a", "b", "c", "d"], "the order of the group stays"


def test_what_a_receive_under_way_still_brings_is_handed_back_untouched(engine: Engine, business: Business) -> None:
    class LongPolling(MemorySource):
        polling, go = threading.Event(), threading.Event()

        def receive(self) -> Any:
            self.polling.set()
            assert self.go.wait(30)
            return super().receive()

    kept, source = Kept(), LongPolling()
    with at_work(make(source, engine, hooks=[kept])):
        assert source.polling.wait(20)
        pause(engine, subscriber_id="billing", by="anna")
        wait_until(lambda: states(engine) == ["paused"], "its receive is still under way")
        feed(source, messages("a", "b"))
        source.go.set()
        wait_until(lambda: states(engine) == ["drained"])
        assert business.applied() == once("")
        assert (kept.outcomes("a"), kept.outcomes("b")) == ([Outcome.IN_FLIGHT], [Outcome.IN_FLIGHT])
        resume(engine, subscriber_id="billing")
        assert source.wait_until_empty(20)
    assert business.applied() == once("ab")


def test_a_worker_that_starts_while_its_subscriber_is_paused_starts_paused(engine: Engine, business: Business) -> None:
    pause(engine, subscriber_id="billing", by="anna")
    kept, source = Kept(), MemorySource(messages("a"))
    worker = make(source, engine, hooks=[kept])
    for _ in range(2):
        with at_work(worker):  # and stops, although it is paused
            wait_until(lambda: states(engine) == ["drained"])
    assert kept.of(Received) == []
    with at_work(worker):
        wait_until(lambda: states(engine) == ["drained"])
        resume(engine, subscriber_id="billing")
        assert source.wait_until_empty(20)
    assert business.applied() == once("a")


def test_a_paused_worker_stays_paused_while_it_cannot_ask(engine: Engine, business: Business) -> None:
    pause(engine, subscriber_id="billing", by="anna")
    source = MemorySource(messages("a"))
    with at_work(make(source, engine)):
        wait_until(lambda: states(engine) == ["drained"])
        run(engine, "ALTER TABLE paused RENAME TO elsewhere")
        assert not source.wait_until_empty(0.5)
        run(engine, "ALTER TABLE elsewhere RENAME TO paused")
        resume(engine, subscriber_id="billing")
        assert source.wait_until_empty(20)


def test_pauses_that_come_and_go_among_two_workers_lose_and_repeat_nothing(engine: Engine, business: Business) -> None:
    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        time.sleep(0.01)  # not a wait: work that takes a while, so that a pause can land in it

    sources = [MemorySource(batch_size=7) for _ in range(2)]
    how = zip(sources, ("batch", "message"), strict=True)  # the second one ends in the middle of what it has received
    sent: list[str] = []
    left = 0
    with at_work(*(make(source, engine, handle, threads=2, transactions=mode) for source, mode in how)):
        for turn in range(4):
            for number, source in enumerate(sources):
                for message in numbered(40, f"s{number}-{turn}-"):
                    source.send(message)
                    sent.append(message.id)
            wait_until(lambda: all(source._taken for source in sources), "both are at work")
            pause(engine, subscriber_id="billing", by="anna")
            wait_until(lambda: states(engine) == ["drained", "drained"])
            before = business.applied()
            left += len(sent) - before.total()
            (now,) = business.rows("SELECT clock_timestamp()")
            wait_until(lambda now=now: business.rows("SELECT min(seen_at) FROM worker_report")[0] > now)
            assert business.applied() == before, "drained, and yet at work"
            resume(engine, subscriber_id="billing")
            wait_until(lambda: states(engine) == ["working", "working"])
        assert all(source.wait_until_empty(60) for source in sources)
    assert left, "no pause came before all was done"
    assert business.applied() == once(sent)
    assert business.recorded() == set(sent)


def test_a_fifo_group_keeps_its_order_over_a_pause_in_its_middle(
    engine: Engine, business: Business, make_queue: Any, sqs: Any
) -> None:
    handle, queue = Hanging("m0003"), make_queue(fifo=True)
    ids = [message.id for message in numbered(25)]
    send(sqs, queue, ids, group="g")
    workers = [
        SqsWorker(
            queue,
            inbox=Inbox("billing", wait_seconds=0.2),
            engine=engine,
            handler=handle,
            transactions="message",
            wait_seconds=1,
        )
        for _ in range(2)
    ]
    with at_work(*workers):
        assert handle.begun.wait(20)
        pause(engine, subscriber_id="billing", by="anna")
        wait_until(lambda: "working" not in states(engine))
        handle.go.set()
        wait_until(lambda: states(engine) == ["drained", "drained"])
        assert business.order() == ids[:4]
        resume(engine, subscriber_id="billing")
        wait_until(lambda: len(business.order()) == len(ids), timeout=40)
    assert business.order() == ids


def test_a_killed_worker_leaves_a_row_that_is_stale_and_its_successor_keeps_to_the_pause(
    engine: Engine, schema_url: str, queue: str, sqs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    business = worker_process.prepare(engine)
    first = worker_process.start(schema_url, queue, wait_seconds=20)
    processes = [first]
    try:
        (killed,) = wait_until(lambda: reported(engine), timeout=60)
        assert (killed.pid, killed.stale, killed.source, killed.state) == (first.pid, False, queue, "working")
        assert killed.source_retention_seconds == 345600.0, "what SQS says of the queue"
        pause(engine, subscriber_id="billing", by="anna")
        send(sqs, queue, ["a", "b", "c"])
        first.kill()
        first.wait()
        assert [one.worker_id for one in reported(engine)] == [killed.worker_id], "nobody has deleted it"
        processes.append(worker_process.start(schema_url, queue))
        wait_until(lambda: [one.pid for one in reported(engine) if one.state == "drained"] == [processes[1].pid])
        ran = business.rows(f"SELECT message_id FROM run WHERE pid <> {first.pid}")
        assert ran == [], "the second one has begun nothing"
        resume(engine, subscriber_id="billing")
        wait_until(lambda: business.recorded() == {"a", "b", "c"}, timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert business.applied() == once("abc")

    monkeypatch.setattr(workers_status, "STALE_SECONDS", 0.5)
    wait_until(lambda: [one.stale for one in reported(engine)] == [True, True])
    with at_work(make(MemorySource(), engine)):
        pass
    assert killed.worker_id in [one.worker_id for one in reported(engine)], "it may be of use to somebody"
    run(engine, "UPDATE worker_report SET seen_at = now() - interval '25 hours'")
    with at_work(make(MemorySource(), engine)):
        pass
    assert reported(engine) == ()


def test_names_are_found_by_their_traces(engine: Engine) -> None:
    with engine.begin() as connection:
        Inbox("billing").record(connection, "m")
    letters = DeadLetters(engine)
    assert letters.list() == []
    with engine.connect() as connection:
        assert find_named(connection, "billing") == ["subscriber"]
        assert find_named(connection, "biling") == []
        assert read_pauses(connection) == ()


@pytest.mark.parametrize("names", [{}, {"subscriber_id": "a", "destination": "b"}, {"subscriber_id": ""}])
def test_a_pause_is_of_one_thing(engine: Engine, names: dict[str, str]) -> None:
    with pytest.raises(InvalidConfiguration, match="either a subscriber_id or a destination"):
        pause(engine, by="anna", **names)


@pytest.fixture(autouse=True)
def _no_reports_left(engine: Engine) -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name == "txbox-reporter"]
