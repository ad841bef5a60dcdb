"""The stop of a worker: it drains, says so when it could not, and may be followed by another start."""

import threading

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from support.txbox.events import Kept
from support.waiting import wait_until
from support.workers.business import Business, apply, once
from support.workers.handlers import Hanging
from support.workers.memory_worker import delivery, make, messages, numbered, process, work_off
from txbox import InvalidConfiguration, Message, Outcome
from txbox.backoff import Backoff
from txbox.instrumentation import Retried, Settled, Stopped
from txbox_workers.memory_source import MemorySource
from txbox_workers.processing import deadlocks


class Closing(MemorySource):
    """Deliveries that need a heartbeat, from a source that counts how often it is closed."""

    visibility_seconds = 30.0
    closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()


def test_stop_finishes_the_transaction_under_way_and_hands_back_the_rest(engine: Engine, business: Business) -> None:
    handle, kept = Hanging(), Kept()
    source = MemorySource(messages("a", "b", "c"))
    worker = make(source, engine, handle, transactions="message", hooks=[kept])
    worker.start()
    assert handle.begun.wait(60)
    stopper = threading.Thread(target=worker.stop)
    stopper.start()
    wait_until(lambda: worker.stopping)
    handle.go.set()
    stopper.join(20)
    assert business.applied() == once("a")
    # A receive that was under way may bring once more, and hand back, what was handed back before it.
    assert set(kept.outcomes("b")) == set(kept.outcomes("c")) == {Outcome.IN_FLIGHT}
    assert kept.of(Stopped)[-1].drained
    work_off(source, engine)
    assert business.applied() == once("abc")


@pytest.mark.parametrize(("deliveries", "transactions"), [(1, "batch"), (3, "batch"), (3, "message")])
def test_stop_does_not_wait_for_a_pause_between_runs_of_a_transaction(
    engine: Engine, business: Business, monkeypatch: pytest.MonkeyPatch, deliveries: int, transactions: str
) -> None:
    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"))

    monkeypatch.setattr(deadlocks, "RETRY_BACKOFF", Backoff(first_seconds=600, longest_seconds=600))
    kept = Kept()
    source = MemorySource(numbered(deliveries))
    worker = make(source, engine, handle, transactions=transactions, hooks=[kept])
    worker.start()
    wait_until(lambda: kept.of(Retried))
    assert worker.stop(20) is True
    handed_back = [event.outcome for event in kept.of(Settled)]  # some twice, if a receive was under way
    assert set(handed_back) == {Outcome.IN_FLIGHT}
    assert len(handed_back) >= deliveries
    assert business.failing() == {}, "it was no attempt that counts"
    work_off(source, engine)
    assert business.applied() == once(message.id for message in numbered(deliveries))


def test_an_attempt_that_was_counted_in_advance_is_taken_back_by_a_stop(engine: Engine, business: Business) -> None:
    def handle(session: Session, message: Message) -> None:
        worker._call_off()
        session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"))

    worker = make(MemorySource(), engine, handle)
    assert process(worker, delivery("a", receive_count=5)) == [("a-5", Outcome.IN_FLIGHT)]
    assert business.failing() == {}


def test_stop_says_so_when_a_handler_hangs_and_the_worker_can_start_again_later(
    engine: Engine, business: Business
) -> None:
    handle, kept = Hanging(), Kept()
    source = MemorySource(messages("a", "b"))
    worker = make(source, engine, handle, transactions="message", hooks=[kept])
    worker.start()
    assert handle.begun.wait(60)
    assert worker.stop(0.1) is False
    assert worker.running
    assert not kept.of(Stopped)[-1].drained
    with pytest.raises(InvalidConfiguration, match="running already"):
        worker.start()
    handle.go.set()
    assert worker.stop(20) is True
    assert not worker.running
    worker.start()
    assert source.wait_until_empty(20)
    assert worker.stop(20) is True
    assert business.applied() == once("ab")


def test_a_handler_may_stop_its_own_worker(engine: Engine, business: Business) -> None:
    answers = []

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        answers.append(worker.stop(0.1))

    source = Closing(messages("a", "b"))
    worker = make(source, engine, handle, transactions="message")
    worker.start()
    wait_until(lambda: not worker.running)
    assert source.closed == 1, "nobody else may come to stop it"
    assert not [thread.name for thread in threading.enumerate() if thread.name == "txbox-heartbeat"]
    assert answers == [False]
    assert worker.stop(5) is True
    assert business.applied() == once("a")


def test_of_several_threads_the_last_one_closes_what_they_share(engine: Engine, business: Business) -> None:
    handle = Hanging()
    source = Closing(messages("a"))
    worker = make(source, engine, handle, threads=3)
    worker.start()
    assert handle.begun.wait(60)
    assert worker.stop(0.1) is False
    wait_until(lambda: sum(thread.is_alive() for thread in worker._threads) == 1)
    assert source.closed == 0, "a delivery under way needs its source, and its heartbeat"
    handle.go.set()
    wait_until(lambda: not worker.running)
    assert source.closed == 1
    assert worker.stop(20) is True
    assert source.closed == 1
    assert business.applied() == once("a")


def test_run_works_outside_the_main_thread_until_stop(engine: Engine, business: Business) -> None:
    source = MemorySource(messages("a"))
    worker = make(source, engine)
    answers: list[bool] = []
    runner = threading.Thread(target=lambda: answers.append(worker.run()))
    runner.start()
    assert source.wait_until_empty(20)
    worker.stop()
    runner.join(20)
    assert not runner.is_alive()
    assert answers == [True]
    # What stopped the first run does not stop the second.
    source.send(messages("b")[0])
    runner = threading.Thread(target=worker.run)
    runner.start()
    assert source.wait_until_empty(20)
    worker.stop()
    runner.join(20)
    assert business.applied() == once("ab")
