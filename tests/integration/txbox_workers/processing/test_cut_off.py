"""Workers that lose the database in a handler and live on: while it cannot be told, nobody takes them for dead."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.orm import Session

from support.postgres.tcp_proxy import TcpProxy
from support.txbox.events import Kept
from support.waiting import wait_until
from support.workers.business import Business, apply, once
from support.workers.memory_worker import at_work, delivery, make, messages, process
from txbox import Inbox, Message, Outcome
from txbox.backoff import Backoff
from txbox.dead_letters.failures import NO_OUTCOME
from txbox.instrumentation import DatabaseLost
from txbox_workers.handlers import Handler
from txbox_workers.memory_source import MemorySource
from txbox_workers.polling import batch_runner, context
from txbox_workers.processing import inbox_processor
from txbox_workers.processing.outage_errors import DatabaseUnavailable


@contextmanager
def roads(schema_url: str, count: int) -> Iterator[list[tuple[TcpProxy, Engine]]]:
    """Engines, each with a road to the database of its own."""
    url = make_url(schema_url)
    with ExitStack() as stack:
        ways = []
        for _ in range(count):
            proxy = stack.enter_context(TcpProxy(url.host or "127.0.0.1", url.port or 5432))
            engine = create_engine(url.set(host="127.0.0.1", port=proxy.port))
            stack.callback(engine.dispose)
            ways.append((proxy, engine))
        yield ways


def cut_off(proxy: TcpProxy, runs: list[int], times: int) -> Handler:
    """A handler that loses the way to the database, in so many of all runs."""

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        runs.append(len(runs))
        if len(runs) <= times:
            proxy.refuse()
            proxy.cut()
            session.execute(text("SELECT 1"))

    return handle


def when_lost(times: int, act: Callable[[], object]) -> Callable[[object], None]:
    """A hook that acts whenever the database was asked for in vain so many times."""
    lost: list[object] = []

    def hook(event: object) -> None:
        if isinstance(event, DatabaseLost):
            lost.append(event)
            if len(lost) % times == 0:
                act()

    return hook


def test_workers_that_are_cut_off_in_turn_make_no_attempts(
    schema_url: str, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_processor, "JUST_BEGUN_SECONDS", 0.0)
    runs: list[int] = []
    source = MemorySource(messages("a"))
    with roads(schema_url, 4) as ways:
        workers = [
            make(source, engine, cut_off(proxy, runs, 6), max_attempts=2, hooks=[when_lost(8, proxy.accept)])
            for proxy, engine in ways
        ]
        with at_work(*workers):
            assert source.wait_until_empty(30)
    assert len(runs) == 7
    assert business.applied() == once("a")
    assert (business.letters(), business.failing()) == ({}, {})


def test_what_was_counted_is_kept_until_it_is_taken_back(proxy: TcpProxy, proxied: Engine, business: Business) -> None:
    runs: list[int] = []
    kept = Kept()
    source = MemorySource(messages("a"))
    with at_work(make(source, proxied, cut_off(proxy, runs, 1), max_attempts=1, hooks=[kept])):
        wait_until(lambda: len(kept.of(DatabaseLost)) >= 4)
        assert source.receive() == [], "no other worker may have it"
        assert business.failing() == {"a": 1}
        proxy.accept()
        assert source.wait_until_empty(20)
    assert kept.outcomes("a") == [Outcome.IN_FLIGHT, Outcome.PROCESSED]
    assert (business.letters(), business.failing()) == ({}, {})


def test_what_was_not_counted_is_handed_back_at_once(proxy: TcpProxy, proxied: Engine, business: Business) -> None:
    runs: list[int] = []
    source = MemorySource(messages("a"))
    with at_work(make(source, proxied, cut_off(proxy, runs, 1))):
        (again,) = wait_until(source.receive)
        assert (again.message.id, again.receive_count) == ("a", 2)
    assert business.failing() == {}


def test_a_worker_that_is_cut_off_for_long_lets_others_go_on(
    proxy: TcpProxy, proxied: Engine, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "KEEP_SECONDS", 0.3)
    source = MemorySource(messages("a"))
    with at_work(make(source, proxied, cut_off(proxy, [], 1), max_attempts=1)):
        (again,) = wait_until(source.receive)
        assert again.message.id == "a"
        assert business.failing() == {"a": 1}
        proxy.accept()
        wait_until(lambda: business.failing() == {}, "it is taken back when that is possible")


@pytest.mark.parametrize("there_again", [True, False])
def test_a_worker_that_stops_tries_once_more_and_leaves_the_rest_to_the_broker(
    proxy: TcpProxy, proxied: Engine, business: Business, monkeypatch: pytest.MonkeyPatch, there_again: bool
) -> None:
    monkeypatch.setattr(context, "OUTAGE_BACKOFF", Backoff(first_seconds=300, longest_seconds=600))
    kept = Kept()
    source = MemorySource(messages("a"))
    worker = make(source, proxied, cut_off(proxy, [], 1), max_attempts=1, hooks=[kept])
    with at_work(worker):
        wait_until(lambda: kept.of(DatabaseLost))
        if there_again:
            proxy.accept()
    assert business.failing() == ({} if there_again else {"a": 1})
    assert kept.outcomes("a") == ([Outcome.IN_FLIGHT] if there_again else [])


# --- answers that are lost beside the handler ------------------------------------------------------------------------


@pytest.mark.parametrize("reaches_server", [True, False])
def test_an_attempt_whose_counting_was_not_answered_is_taken_back(
    proxy: TcpProxy, proxied: Engine, business: Business, reaches_server: bool
) -> None:
    worker = make(MemorySource(), proxied, max_attempts=3)
    suspect = delivery("a", receive_count=2)
    proxy.lose_next(reaches_server=reaches_server)
    with pytest.raises(DatabaseUnavailable):
        process(worker, suspect)
    assert business.failing() == ({"a": 1} if reaches_server else {})
    assert worker._processor.has_unsaved(suspect)
    worker._processor.check_recording()
    assert not worker._processor.has_unsaved(suspect)
    assert business.failing() == {}


def test_a_failure_that_could_not_be_noted_is_noted_later_and_is_no_crash(
    proxy: TcpProxy, proxied: Engine, business: Business
) -> None:
    def fail(session: Session, message: Message) -> None:
        proxy.lose_next(reaches_server=False)
        raise ValueError("no")

    worker = make(MemorySource(), proxied, fail, max_attempts=3)
    suspect = delivery("a", receive_count=2)
    with pytest.raises(DatabaseUnavailable):
        process(worker, suspect)
    assert business.rows("SELECT error FROM message_failure") == [NO_OUTCOME]
    assert worker._processor.has_unsaved(suspect)
    worker._processor.check_recording()
    assert business.rows("SELECT error FROM message_failure") == ["ValueError: no"]
    assert not worker._processor.has_unsaved(suspect)


def test_a_message_in_flight_whose_attempt_cannot_be_taken_back_is_kept(
    proxy: TcpProxy, proxied: Engine, engine: Engine, business: Business
) -> None:
    worker = make(MemorySource(), proxied, max_attempts=3)
    suspect = delivery("a", receive_count=2)
    with engine.connect() as elsewhere:
        Inbox("billing").record(elsewhere, "a")
        proxy.lose_next(b"FOR UPDATE", reaches_server=False)
        with pytest.raises(DatabaseUnavailable):
            process(worker, suspect)
        elsewhere.rollback()
    assert proxy.lost == 1
    assert worker._processor.has_unsaved(suspect)
    assert process(worker, suspect) == [("a-2", Outcome.PROCESSED)]
    assert business.failing() == {}
