"""Workers that receive ahead and settle behind: nothing is lost, doubled or out of order, and stops leave nothing."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.postgres.tcp_proxy import TcpProxy
from support.txbox.events import Kept
from support.waiting import wait_until
from support.workers.business import Business, apply, once
from support.workers.fifo_source import FifoSource
from support.workers.handlers import Hanging
from support.workers.memory_worker import at_work, feed, make, numbered, work_off
from support.workers.ordered import by_key
from txbox import BrokerError, Message, Outcome
from txbox.instrumentation import BrokerLost, BrokerRestored, DatabaseLost, Drained, Paused, Received, Resumed, Settled
from txbox.operations.pauses import pause, resume
from txbox_workers import reporter
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.memory_source import MemorySource
from txbox_workers.polling import prefetching_poller, settler


class Distant(MemorySource):
    """A source whose calls take a while, as over a network; it notes how many go on at a time, and what is held."""

    def __init__(self, *arguments: Any, seconds: float = 0.01, visibility: float | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seconds, self._visibility = seconds, visibility
        self._calls = 0
        self.most_calls = self.most_held = 0
        self.acked_at_once: list[int] = []

    @property
    def visibility_seconds(self) -> float | None:
        return self._visibility

    def receive(self) -> Sequence[Delivery]:
        with self._condition:
            self._calls += 1
            self.most_calls = max(self.most_calls, self._calls)
        time.sleep(self._seconds)  # the way to a broker and back
        deliveries = super().receive()
        with self._condition:
            self._calls -= 1
            self.most_held = max(self.most_held, len(self._taken))
        return deliveries

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        time.sleep(self._seconds)  # the same
        self.acked_at_once.append(len(deliveries))
        return super().ack(deliveries)


@pytest.mark.parametrize("threads", [1, 3])
def test_each_message_is_applied_once_and_acked(engine: Engine, business: Business, threads: int) -> None:
    source = Distant(numbered(300) + numbered(100))
    kept = Kept()
    work_off(source, engine, threads=threads, prefetch=80, hooks=[kept])
    assert business.applied() == once(message.id for message in numbered(300))
    assert Counter(event.outcome for event in kept.of(Settled)) == {Outcome.PROCESSED: 300, Outcome.DUPLICATE: 100}
    assert source.most_calls > 1, "receives run beside each other"
    assert source.most_held <= 80


def test_batches_are_as_large_as_is_asked_for_and_acks_are_gathered(engine: Engine, business: Business) -> None:
    sizes: list[int] = []

    def handle(session: Session, received: Sequence[Message]) -> None:
        sizes.append(len(received))
        for message in received:
            apply(session, message)

    source = Distant(numbered(400))
    work_off(source, engine, batch_handler=handle, prefetch=400, batch_size=100, gather_seconds=5.0)
    assert sizes == [100] * 4
    assert business.applied() == once(message.id for message in numbered(400))
    assert min(source.acked_at_once) >= 10


def test_few_acks_wait_for_others_but_not_for_long(engine: Engine, business: Business) -> None:
    source = Distant(numbered(3))
    with at_work(make(source, engine, prefetch=100, transactions="message")):
        assert source.wait_until_empty(settler.GATHER_SECONDS * 100)
        assert source.acked_at_once == [3]
    assert business.applied() == once(message.id for message in numbered(3))


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threads", "batch_size"), [(1, 10), (4, 3)])
def test_groups_keep_their_order_over_failures(
    engine: Engine, business: Business, threads: int, batch_size: int
) -> None:
    stumbles: Counter[str] = Counter()
    lock = threading.Lock()
    dead = {"g1-07", "g4-00"}

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        with lock:
            stumbles[message.id] += 1
            times = stumbles[message.id]
        if message.id in dead or (int(message.id[-2:]) % 6 == 4 and times <= 3):
            raise ValueError("no")

    source = FifoSource()
    sent = {f"g{group}": [f"g{group}-{number:02}" for number in range(20)] for group in range(6)}
    for start in range(0, 20, 5):
        for group, ids in sent.items():
            source.send_in(group, *ids[start : start + 5])
    work_off(source, engine, handle, threads=threads, prefetch=60, batch_size=batch_size, max_attempts=4)
    assert by_key(business.order()) == {group: [id_ for id_ in ids if id_ not in dead] for group, ids in sent.items()}
    assert set(business.letters()) == dead


def test_keys_of_an_ordered_worker_keep_their_order_in_a_batch_of_many_receives(
    engine: Engine, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetching_poller, "RECEIVERS", 1)  # of two answers at the same time, either may be first
    failed: set[str] = set()

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id.endswith("-3") and message.id not in failed:
            failed.add(message.id)
            raise ValueError("not yet")

    sent = [Message(f"k{key}-{number}", b"", {"key": f"k{key}"}) for number in range(8) for key in range(10)]
    source = MemorySource(sent)
    work_off(source, engine, handle, prefetch=100, batch_size=20, ordered=True, max_attempts=1)
    # What has failed is parked at once, and what follows it is parked behind it.
    assert by_key(business.order()) == {f"k{key}": [f"k{key}-{number}" for number in range(3)] for key in range(10)}
    assert len(business.letters()) == 50


# --- what is held ----------------------------------------------------------------------------------------------------


def test_a_slow_handler_holds_little_and_leaves_the_rest_to_other_workers(engine: Engine, business: Business) -> None:
    slow = Hanging()
    source = Distant(numbered(500), visibility=30.0)
    with at_work(make(source, engine, slow, prefetch=500, transactions="message")):
        assert slow.begun.wait(60)
        with at_work(make(source, engine, prefetch=500)):
            wait_until(lambda: len(business.applied()) >= 480)
        assert len(source._taken) <= 20
        slow.go.set()
        assert source.wait_until_empty(60)
    assert business.applied() == once(message.id for message in numbered(500))


def test_the_heartbeat_extends_what_waits_for_a_slow_handler(engine: Engine, business: Business) -> None:
    extended: set[str] = set()
    begun, all_extended = threading.Event(), threading.Event()

    class Ending(MemorySource):
        visibility_seconds = 1.0

        def extend_visibility(self, deliveries: Sequence[Delivery], seconds: float) -> dict[str, str]:
            extended.update(delivery.message.id for delivery in deliveries)
            if len(extended) == 15:
                all_extended.set()
            return {}

    def slow(session: Session, message: Message) -> None:
        apply(session, message)
        if not begun.is_set():
            begun.set()
            assert all_extended.wait(60)

    source = Ending(numbered(15))
    work_off(source, engine, slow, prefetch=100, transactions="message")
    assert extended == {message.id for message in numbered(15)}
    assert business.applied() == once(message.id for message in numbered(15))


# --- stops, pauses, outages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_a_stop_finishes_what_was_begun_and_hands_back_all_else(
    engine: Engine, business: Business, transactions: str
) -> None:
    handle = Hanging()
    source = Distant(numbered(200))
    kept = Kept()
    worker = make(source, engine, handle, threads=2, prefetch=100, transactions=transactions, hooks=[kept])
    worker.start()
    assert handle.begun.wait(60)
    wait_until(lambda: len(source._taken) >= 100)
    stopper = threading.Thread(target=worker.stop)
    stopper.start()
    wait_until(lambda: worker.stopping)
    handle.go.set()
    stopper.join(20)
    assert not worker.running
    assert source._taken == {}, "all that was received is acked or handed back"
    received = [delivery_id for event in kept.of(Received) for delivery_id in event.delivery_ids]
    assert Counter(event.delivery_id for event in kept.of(Settled)) == once(received)
    done = {event.message_id for event in kept.of(Settled) if event.outcome is Outcome.PROCESSED}
    assert business.applied() == once(done)
    assert 1 <= len(done) <= 20
    work_off(source, engine, prefetch=100)
    assert business.applied() == once(message.id for message in numbered(200))


def test_a_paused_worker_hands_back_what_it_holds_and_is_drained(
    engine: Engine, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "REPORT_SECONDS", 0.1)
    handle = Hanging()
    source = Distant(numbered(100))
    kept = Kept()
    with at_work(make(source, engine, handle, prefetch=50, transactions="message", hooks=[kept])):
        assert handle.begun.wait(60)
        wait_until(lambda: len(source._taken) >= 50)
        pause(engine, subscriber_id="billing", by="a test")
        wait_until(lambda: len(source._taken) <= 10, "the batch that was begun is held, and nothing else")
        assert kept.of(Drained) == []
        handle.go.set()
        wait_until(lambda: kept.of(Drained))
        assert source._taken == {}
        applied = len(business.applied())
        assert applied <= 10
        resume(engine, subscriber_id="billing")
        assert source.wait_until_empty(60)
    assert business.applied() == once(message.id for message in numbered(100))
    assert [type(one) for one in kept.of(Paused, Drained, Resumed)] == [Paused, Drained, Resumed]


@pytest.mark.usefixtures("short_pauses", "without_reports")
@pytest.mark.parametrize("threads", [1, 3])
def test_in_an_outage_of_the_database_what_is_held_is_handed_back_and_nothing_is_received(
    proxy: TcpProxy, proxied: Engine, business: Business, threads: int
) -> None:
    kept = Kept()
    source = Distant(batch_size=10)
    worker = make(source, proxied, threads=threads, prefetch=50, hooks=[kept])
    with at_work(worker):
        proxy.refuse()
        proxy.cut()
        feed(source, numbered(200))
        wait_until(lambda: len(kept.of(DatabaseLost)) >= 5 * threads)
        wait_until(lambda: worker._activity.awaiting_threads == threads)
        wait_until(lambda: not source._taken, "all is handed back")
        received = next(source._numbers)
        lost = len(kept.of(DatabaseLost))
        wait_until(lambda: len(kept.of(DatabaseLost)) >= lost + 3)
        assert next(source._numbers) == received + 1, "nothing was received, to be handed back, meanwhile"
        proxy.accept()
        assert source.wait_until_empty(60)
    assert business.applied() == once(message.id for message in numbered(200))
    assert business.failing() == {}


@pytest.mark.usefixtures("short_pauses")
def test_a_broker_that_fails_is_asked_by_one_thread_and_its_return_is_said_once(
    engine: Engine, business: Business
) -> None:
    class Failing(Distant):
        fails = False

        def receive(self) -> Sequence[Delivery]:
            if self.fails:
                raise BrokerError("no broker")
            return super().receive()

    source = Failing(numbered(100))
    kept = Kept()
    with at_work(make(source, engine, prefetch=100, hooks=[kept])):
        assert source.wait_until_empty(60)
        source.fails = True
        wait_until(lambda: len(kept.of(BrokerLost)) >= 3)
        feed(source, numbered(100, "n"))
        source.fails = False
        assert source.wait_until_empty(60)
    assert len(kept.of(BrokerRestored)) == 1
    assert len(business.applied()) == 200


def test_a_settlement_that_cannot_be_made_costs_a_redelivery_at_most(engine: Engine, business: Business) -> None:
    class Losing(Distant):
        calls = itertools.count()

        def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
            if next(self.calls) % 3 == 0:
                self.hand_back([Settlement(delivery, Outcome.IN_FLIGHT) for delivery in deliveries])
                raise BrokerError("the broker did not answer")
            return super().ack(deliveries)

    source = Losing(numbered(200))
    work_off(source, engine, threads=2, prefetch=100)
    assert business.applied() == once(message.id for message in numbered(200))


def test_a_worker_can_be_started_again_after_a_stop(engine: Engine, business: Business) -> None:
    source = Distant()
    worker = make(source, engine, prefetch=50)
    for several in (numbered(50), numbered(50, "n")):
        feed(source, several)
        with at_work(worker):
            assert source.wait_until_empty(60)
    assert len(business.applied()) == 100
