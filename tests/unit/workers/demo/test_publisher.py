"""The producer sends everything, and as much too much as it says."""

import threading
from collections import Counter
from typing import Any

import pytest

from support.waiting import wait_until
from txbox import BrokerError
from txbox_workers.demo.publisher import RESENT_SHARE, TWICE_SHARE, Publisher
from txbox_workers.demo.purchases import read_purchases

PURCHASES = 20_000


class Queue:
    """An SQS client that keeps what it is sent."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, str]]] = []
        self.failed: list[dict[str, str]] = []
        self.error: Exception | None = None

    def send_message_batch(self, *, QueueUrl: str, Entries: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: N803
        assert 1 <= len(Entries) <= 10
        assert len({entry["Id"] for entry in Entries}) == len(Entries)
        if self.error is not None:
            raise self.error
        self.batches.append(
            [(entry["MessageAttributes"]["message-id"]["StringValue"], entry["MessageBody"]) for entry in Entries]
        )
        return {"Failed": self.failed}

    @property
    def times(self) -> Counter[str]:
        return Counter(event_id for batch in self.batches for event_id, _ in batch)


def publish(queue: Queue, *, count: int = PURCHASES, seed: int = 1997) -> tuple[Publisher, list[int]]:
    told: list[int] = []
    purchases = read_purchases(count)
    publisher = Publisher(queue, "q", purchases, seed=seed, on_sent=told.append)  # type: ignore[arg-type]
    publisher.start()
    wait_until(lambda: publisher.done, "everything is sent", timeout=60)
    return publisher, told


def test_everything_is_sent_and_the_stated_shares_again() -> None:
    queue = Queue()
    publisher, told = publish(queue)
    sent = publisher.sent
    assert publisher.error is None
    assert sent.purchases == sum(told) == len(queue.times) == PURCHASES
    assert sent.messages == sum(map(len, queue.batches)) == PURCHASES + sent.resent + sent.in_batches_sent_twice
    assert sent.resent / PURCHASES == pytest.approx(RESENT_SHARE, abs=0.01)
    assert sent.in_batches_sent_twice / PURCHASES == pytest.approx(TWICE_SHARE, abs=0.01)
    assert set(queue.times.values()) == {1, 2, 3}


def test_a_duplicate_has_the_same_id_and_body_and_comes_later_in_another_batch() -> None:
    queue = Queue()
    publish(queue, count=1000)
    bodies: dict[str, str] = {}
    for batch in queue.batches:
        assert len({event_id for event_id, _ in batch}) == len(batch)
        for event_id, body in batch:
            assert bodies.setdefault(event_id, body) == body


def test_the_seed_decides() -> None:
    one, same, other = Queue(), Queue(), Queue()
    publish(one, count=500)
    publish(same, count=500)
    publish(other, count=500, seed=1)
    assert one.batches == same.batches
    assert one.batches != other.batches


def test_a_refused_entry_and_a_failed_call_are_kept_for_the_run() -> None:
    queue = Queue()
    queue.failed = [{"Id": "0", "Code": "Throttled"}]
    publisher, _ = publish(queue, count=10)
    assert isinstance(publisher.error, BrokerError)
    queue.error = OSError("unplugged")
    publisher, _ = publish(queue, count=10)
    assert publisher.error is queue.error


def test_it_can_be_stopped_on_the_way() -> None:
    sending = threading.Event()
    publisher = Publisher(Queue(), "q", read_purchases(), seed=1, on_sent=lambda _: sending.set())  # type: ignore[arg-type]
    publisher.start()
    assert sending.wait(20)
    publisher.stop()
    assert publisher.done
    assert 0 < publisher.sent.purchases < 69_659
