"""The source in memory keeps the promises of a broker."""

import threading
import time

from txbox import Message, Outcome
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.memory_source import MemorySource


def messages(count: int) -> list[Message]:
    return [Message(f"m-{number}", b"body") for number in range(count)]


def ids(deliveries: "list[Delivery]") -> list[str]:
    return [delivery.message.id for delivery in deliveries]


def failed(delivery: Delivery, delay_seconds: float = 0.0) -> Settlement:
    return Settlement(delivery, Outcome.FAILED, delay_seconds=delay_seconds)


def test_messages_are_delivered_in_order_and_in_batches() -> None:
    source = MemorySource(messages(25), batch_size=10, wait_seconds=0)
    assert [ids(list(source.receive())) for _ in range(4)] == [
        [f"m-{number}" for number in range(10)],
        [f"m-{number}" for number in range(10, 20)],
        [f"m-{number}" for number in range(20, 25)],
        [],
    ]


def test_what_is_taken_is_not_delivered_again_until_it_is_handed_back() -> None:
    source = MemorySource(messages(1), wait_seconds=0)
    (first,) = source.receive()
    assert list(source.receive()) == []
    source.hand_back([failed(first)])
    (second,) = source.receive()
    assert second.message is first.message
    assert second.receipt != first.receipt
    assert (first.receive_count, second.receive_count) == (1, 2)


def test_what_is_acked_never_comes_again_and_only_then_the_source_is_empty() -> None:
    source = MemorySource(messages(1), wait_seconds=0)
    assert not source.wait_until_empty(timeout=0)
    (delivery,) = source.receive()
    assert not source.wait_until_empty(timeout=0)
    assert list(source.ack([delivery])) == [delivery.receipt]
    assert source.wait_until_empty(timeout=0)
    assert list(source.receive()) == []


def test_a_delivery_is_settled_once() -> None:
    source = MemorySource(messages(1), wait_seconds=0)
    (delivery,) = source.receive()
    source.hand_back([failed(delivery)])
    assert list(source.ack([delivery])) == []
    source.hand_back([failed(delivery)])
    assert len(source.receive()) == 1
    assert list(source.receive()) == []


def test_a_delay_is_kept() -> None:
    source = MemorySource(messages(2), wait_seconds=0)
    late, soon = source.receive()
    source.hand_back([failed(late, 3600), failed(soon, 0)])
    assert ids(list(source.receive())) == ["m-1"]
    assert list(source.receive()) == []
    assert not source.wait_until_empty(timeout=0)


def test_a_message_wakes_the_receiver_that_waits_for_it() -> None:
    source = MemorySource(wait_seconds=60)
    received: list[str] = []
    onlooker = threading.Thread(target=source.wait_until_empty, args=(0,))
    receiver = threading.Thread(target=lambda: received.extend(ids(list(source.receive()))))
    begun = time.monotonic()
    for thread in (onlooker, receiver):
        thread.start()
    source.send(Message("m-1", b"body"))
    receiver.join(30)
    onlooker.join(30)
    assert received == ["m-1"]
    assert time.monotonic() - begun < 30


def test_waiting_for_the_last_ack_ends_with_it() -> None:
    source = MemorySource(messages(1), wait_seconds=0)
    (delivery,) = source.receive()
    found: list[bool] = []
    waiter = threading.Thread(target=lambda: found.append(source.wait_until_empty(timeout=60)))
    waiter.start()
    source.ack([delivery])
    waiter.join(30)
    assert found == [True]


def test_a_delivery_is_ours_for_ever() -> None:
    source = MemorySource(messages(1), name="test", wait_seconds=0)
    source.open()
    assert source.name == "test"
    assert source.visibility_seconds is None
    assert source.extend_visibility(list(source.receive()), 30) == {}
    source.close()
