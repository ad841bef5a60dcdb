"""What every source must do: the suite of ``txbox_workers.delivery.Source``."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Protocol

import pytest

from txbox import BrokerError, Message, Outcome
from txbox_workers.delivery import Delivery, Settlement, Source, require_source

__all__ = ["QueueUnderTest", "SourceConformance"]

LIMIT_SECONDS = 30.0
"""A message that is due has arrived by then."""

BODIES = [b'{"cents": 1}', b' {"spaced" :1}\r\n', "größe ☃ 🦆\t\n".encode(), b"plain", b"\x00\xff\x80", b"x" * 100_000]
HEADERS = {"tenant": "Zoë, <b>&amp;</b>", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


class QueueUnderTest(Protocol):
    """A test's own empty queue. It can also do what its sources cannot: put messages, and count them.

    Attributes:
        batch_size: the most messages that its sources receive at once, at most 10.
        keeps_order: whether the broker itself keeps the order of each key, as FIFO queues do.
    """

    batch_size: int
    keeps_order: bool

    def source(self, visibility_seconds: int = 60) -> Source:
        """Return a source, a new client of the queue each time, whose ``receive`` waits for at most a second.

        A broker without visibility, whose sources return None for it, ignores ``visibility_seconds``.
        """

    def missing(self) -> Source | None:
        """Return a source of a queue that does not exist, or None if the broker has no such thing."""

    def put(self, messages: Sequence[Message], key: str | None = None) -> None:
        """Send messages in order with their ids and headers, and with ``key`` if it is given."""

    def held(self) -> int:
        """Return how many messages the broker holds, delivered ones included. Tests ask again while it is too many."""


class SourceConformance:
    """Subclass it, and override ``queue``."""

    @pytest.fixture
    def queue(self) -> QueueUnderTest:
        """Return a test's own queue."""
        raise NotImplementedError

    def test_it_has_all_that_a_source_has(self, queue: QueueUnderTest) -> None:
        with closing(queue.source(7)) as source, closing(queue.source(7)) as other:
            require_source(source, "source")
            assert source.name
            assert source.name == other.name
            assert source.visibility_seconds in (None, 7)

    def test_open_says_nothing_where_the_queue_is_there(self, queue: QueueUnderTest) -> None:
        with closing(queue.source()) as source:
            source.open()
            source.open()
            kept = getattr(source, "retention_seconds", None)
            assert kept is None or kept > 0

    def test_a_queue_that_is_not_there_is_a_broker_error(self, queue: QueueUnderTest) -> None:
        missing = queue.missing()
        if missing is None:
            pytest.skip("its queues are always there")
        with closing(missing):
            with pytest.raises(BrokerError):
                missing.open()
            with pytest.raises(BrokerError):
                missing.receive()

    def test_receive_returns_none_where_there_is_nothing(self, queue: QueueUnderTest) -> None:
        with closing(queue.source()) as source:
            began = time.monotonic()
            assert list(source.receive()) == []
            assert time.monotonic() - began < LIMIT_SECONDS / 2, "a stop waits for it"

    def test_bodies_arrive_byte_for_byte_under_their_ids_with_their_headers(self, queue: QueueUnderTest) -> None:
        put = {f"id {number} of größe": body for number, body in enumerate(BODIES)}
        queue.put([Message(id_, body, HEADERS) for id_, body in put.items()])
        with closing(queue.source()) as source:
            received = all_of(source, len(put))
        assert {one.message.id: one.message.body for one in received} == put
        assert [one.problem for one in received] == [None] * len(put)
        assert all(HEADERS.items() <= one.message.headers.items() for one in received)
        assert {one.message.source for one in received} <= {"", source.name}

    def test_receive_returns_no_more_than_it_was_told(self, queue: QueueUnderTest) -> None:
        queue.put(messages(2 * queue.batch_size + 1))
        with closing(queue.source()) as source:
            sizes: list[int] = []

            def enough() -> bool:
                sizes.append(len(source.receive()))
                return sum(sizes) == 2 * queue.batch_size + 1

            until(enough)
        assert max(sizes) <= queue.batch_size

    def test_a_delivery_is_the_first_and_nobody_else_has_it(self, queue: QueueUnderTest) -> None:
        queue.put(messages(5))
        with closing(queue.source()) as source, closing(queue.source()) as other:
            received = all_of(source, 5)
            assert ids(received) == ["m-0", "m-1", "m-2", "m-3", "m-4"]
            assert len({one.receipt for one in received}) == 5
            assert {one.receive_count for one in received} == {1}
            assert list(other.receive()) == []
            until(lambda: queue.held() == 5)

    def test_what_is_acked_is_gone_and_nothing_else_is(self, queue: QueueUnderTest) -> None:
        queue.put(messages(3))
        with closing(queue.source()) as source:
            first, second, third = all_of(source, 3)
            assert set(source.ack([first, third])) == {first.receipt, third.receipt}
            until(lambda: queue.held() == 1)
            source.hand_back([failed(second)])
            assert ids(all_of(source, 1)) == [second.message.id]
            assert list(source.receive()) == []

    def test_more_than_a_batch_is_acked_in_one_call(self, queue: QueueUnderTest) -> None:
        count = 2 * queue.batch_size + 5
        queue.put(messages(count))
        with closing(queue.source()) as source:
            received = all_of(source, count)
            assert set(source.ack(received)) == {one.receipt for one in received}
        until(lambda: queue.held() == 0)

    def test_to_settle_nothing_does_nothing(self, queue: QueueUnderTest) -> None:
        with closing(queue.source()) as source:
            assert list(source.ack([])) == []
            source.hand_back([])
            assert source.extend_visibility([], 30) == {}

    def test_a_second_ack_does_no_harm(self, queue: QueueUnderTest) -> None:
        queue.put(messages(2))
        with closing(queue.source()) as source:
            first, _ = all_of(source, 2)
            source.ack([first])
            source.ack([first])
        until(lambda: queue.held() == 1)

    def test_what_is_handed_back_comes_again_to_any_client_and_is_counted(self, queue: QueueUnderTest) -> None:
        queue.put([Message("m", BODIES[0], HEADERS)])
        with closing(queue.source()) as one, closing(queue.source()) as other:
            receipts = set()
            for count in (1, 2, 3):
                (delivery,) = all_of(one if count % 2 else other, 1)
                assert (delivery.receive_count, delivery.message.id) == (count, "m")
                assert delivery.message.body == BODIES[0]
                assert HEADERS.items() <= delivery.message.headers.items()
                receipts.add(delivery.receipt)
                (one if count % 2 else other).hand_back([failed(delivery)])
            assert len(receipts) == 3, "a receipt names one delivery"

    def test_more_than_a_batch_is_handed_back_in_one_call(self, queue: QueueUnderTest) -> None:
        count = 2 * queue.batch_size + 5
        queue.put(messages(count))
        with closing(queue.source()) as source:
            source.hand_back([failed(delivery) for delivery in all_of(source, count)])
            assert {one.receive_count for one in all_of(source, count)} == {2}

    def test_what_is_handed_back_with_a_delay_comes_after_it(self, queue: QueueUnderTest) -> None:
        queue.put(messages(2))
        with closing(queue.source()) as source:
            late, soon = all_of(source, 2)
            source.hand_back([failed(late, 3), failed(soon)])
            began = time.monotonic()
            assert ids(all_of(source, 1)) == [soon.message.id]
            assert ids(all_of(source, 1)) == [late.message.id]
            assert time.monotonic() - began > 1.5

    def test_what_is_not_settled_comes_again_after_its_visibility(self, queue: QueueUnderTest) -> None:
        with closing(queue.source(1)) as dies:
            if dies.visibility_seconds is None:
                pytest.skip("its deliveries are their receiver's for ever")
            queue.put(messages(1))
            all_of(dies, 1)
        with closing(queue.source()) as source:
            (again,) = all_of(source, 1)
        assert (again.message.id, again.receive_count) == ("m-0", 2)

    def test_an_extension_keeps_a_delivery_from_others(self, queue: QueueUnderTest) -> None:
        with closing(queue.source(3)) as source, closing(queue.source(3)) as other:
            if source.visibility_seconds is None:
                pytest.skip("its deliveries are their receiver's for ever")
            queue.put(messages(1))
            (delivery,) = all_of(source, 1)
            began = time.monotonic()
            assert source.extend_visibility([delivery], 60) == {}
            while time.monotonic() - began < 4.5:
                assert list(other.receive()) == []
            assert list(source.ack([delivery])) == [delivery.receipt]
        until(lambda: queue.held() == 0)

    def test_a_key_travels(self, queue: QueueUnderTest) -> None:
        queue.put(messages(3), key="ann")
        with closing(queue.source()) as source:
            assert [one.order_key for one in all_of(source, 3)] == ["ann"] * 3

    def test_messages_of_a_key_come_in_order_where_the_broker_keeps_it(self, queue: QueueUnderTest) -> None:
        if not queue.keeps_order:
            pytest.skip("the broker keeps no order")
        for number in range(3):
            for key in ("ann", "bob"):
                queue.put([Message(f"{key}-{number}", b"{}")], key=key)
        with closing(queue.source()) as source:
            received = in_order(source, 6)
            assert {one.group for one in received} == {"ann", "bob"}
            for key in ("ann", "bob"):
                of_key = [one.message.id for one in received if one.group == key]
                assert of_key == [f"{key}-{number}" for number in range(3)]

    def test_several_threads_receive_each_message_once_and_ack_it(self, queue: QueueUnderTest) -> None:
        queue.put(messages(40))
        seen: list[str] = []
        with closing(queue.source()) as source, ThreadPoolExecutor(8) as pool:

            def work() -> None:
                def acked_all() -> bool:
                    received = source.receive()
                    seen.extend(one.message.id for one in received)
                    assert set(source.ack(received)) == {one.receipt for one in received}
                    return len(seen) >= 40

                until(acked_all)

            for ended in [pool.submit(work) for _ in range(8)]:
                ended.result()
        assert sorted(seen) == sorted(one.id for one in messages(40))
        until(lambda: queue.held() == 0)

    def test_one_that_was_closed_closes_no_other_and_can_be_opened_again(self, queue: QueueUnderTest) -> None:
        queue.put(messages(1))
        with closing(queue.source()) as source, closing(queue.source()) as other:
            for client in (source, other, source):  # a worker that was stopped can start again
                client.open()
                (delivery,) = all_of(client, 1)
                client.hand_back([failed(delivery)])
                source.close()
                source.close()
            assert ids(all_of(other, 1)) == ["m-0"]


def messages(count: int) -> list[Message]:
    return [Message(f"m-{number}", b'{"number": %d}' % number) for number in range(count)]


def ids(deliveries: Sequence[Delivery]) -> list[str]:
    """Return the ids of messages, sorted: most brokers promise no order."""
    return sorted(delivery.message.id for delivery in deliveries)


def failed(delivery: Delivery, delay_seconds: float = 0.0) -> Settlement:
    """Return the settlement by which a worker hands back a delivery after a failure."""
    return Settlement(delivery, Outcome.FAILED, delay_seconds=delay_seconds)


def until(done: Callable[[], object]) -> None:
    """Call ``done`` until it returns true, for at most ``LIMIT_SECONDS``."""
    end = time.monotonic() + LIMIT_SECONDS
    while not done():
        assert time.monotonic() < end, f"it has not come within {LIMIT_SECONDS:g} s"


def in_order(source: Source, count: int) -> list[Delivery]:
    """Receive ``count`` messages in the order in which they arrive, and ack each batch."""
    found: list[Delivery] = []

    def enough() -> bool:
        received = source.receive()
        found.extend(received)
        source.ack(received)
        return len(found) >= count

    until(enough)
    assert len(found) == count
    return found


def all_of(source: Source, count: int) -> list[Delivery]:
    """Receive ``count`` messages without settling any. Return them sorted by their ids."""
    found: list[Delivery] = []

    def enough() -> bool:
        found.extend(source.receive())
        return len(found) >= count

    until(enough)
    assert len(found) == count, [one.message.id for one in found]
    return sorted(found, key=lambda one: one.message.id)
