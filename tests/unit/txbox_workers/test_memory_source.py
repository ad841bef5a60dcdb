"""The source in memory: what it does beyond the port, whose suite is run in txbox_testing/test_conformance.py."""

import threading
import time

from txbox import Message
from txbox_testing.conformance.source import failed, ids, messages
from txbox_workers.memory_source import MemorySource


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


def test_a_message_wakes_the_receiver_that_waits_for_it() -> None:
    source = MemorySource(wait_seconds=60)
    received: list[str] = []
    onlooker = threading.Thread(target=source.wait_until_empty, args=(0,))
    receiver = threading.Thread(target=lambda: received.extend(ids(source.receive())))
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
