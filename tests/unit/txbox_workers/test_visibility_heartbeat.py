"""The heartbeat: extends in time, gives up when told, and survives its broker's bad days.

Tests wait on what the fake source was asked, never on time alone. Deliveries are ours for six seconds here, and they
are said to have arrived long enough ago for their half time to be near.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from support.waiting import wait_until
from txbox import BrokerError, Message
from txbox_workers.delivery import Delivery
from txbox_workers.memory_source import MemorySource
from txbox_workers.visibility_heartbeat import VisibilityHeartbeat

VISIBILITY_SECONDS = 6.0
HALF_TIME = VISIBILITY_SECONDS / 2


class FakeSource(MemorySource):
    """Writes down what it is asked to extend, and answers as told."""

    visibility_seconds: float | None = VISIBILITY_SECONDS

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[float, list[str], float]] = []
        self.answer: Callable[[Sequence[Delivery]], Mapping[str, str]] = lambda deliveries: {}

    def extend_visibility(self, deliveries: Sequence[Delivery], seconds: float) -> Mapping[str, str]:
        self.calls.append((time.monotonic(), [delivery.receipt for delivery in deliveries], seconds))
        return self.answer(deliveries)

    def times_extended(self, receipt: str) -> int:
        return sum(receipt in receipts for _, receipts, _ in list(self.calls))


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def reported() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def heartbeat(source: FakeSource, reported: list[tuple[str, str]]) -> Iterator[VisibilityHeartbeat]:
    heartbeat = VisibilityHeartbeat(source, lambda delivery, why: reported.append((delivery.receipt, why)))
    heartbeat.start()
    yield heartbeat
    heartbeat.stop()


def delivery(receipt: str) -> Delivery:
    return Delivery(Message(f"id of {receipt}", b""), receipt=receipt)


def half_time_in(seconds: float) -> float:
    """When a delivery must have arrived for its half time to be so many seconds away."""
    return time.monotonic() - HALF_TIME + seconds


def test_a_delivery_is_extended_at_half_time_and_not_before(heartbeat: VisibilityHeartbeat, source: FakeSource) -> None:
    due = time.monotonic() + 0.2
    heartbeat.watch([delivery("slow")], received_at=due - HALF_TIME)
    wait_until(lambda: source.calls)
    ((asked_at, receipts, seconds),) = source.calls
    assert receipts == ["slow"]
    assert seconds == VISIBILITY_SECONDS
    assert due <= asked_at < due + 2.0


def test_a_delivery_is_extended_for_as_long_as_it_is_watched(
    heartbeat: VisibilityHeartbeat, source: FakeSource
) -> None:
    source.visibility_seconds = 0.2
    heartbeat.watch([delivery("slow")], received_at=time.monotonic())
    wait_until(lambda: source.times_extended("slow") >= 3)
    moments = [asked_at for asked_at, _, _ in source.calls]
    assert all(later - earlier >= 0.1 for earlier, later in itertools.pairwise(moments))


def test_deliveries_that_are_due_together_are_one_call(heartbeat: VisibilityHeartbeat, source: FakeSource) -> None:
    heartbeat.watch([delivery("a"), delivery("b"), delivery("c")], received_at=half_time_in(0))
    wait_until(lambda: source.calls)
    assert source.calls[0][1] == ["a", "b", "c"]


def test_a_later_delivery_with_an_earlier_half_time_is_not_kept_waiting(
    heartbeat: VisibilityHeartbeat, source: FakeSource
) -> None:
    heartbeat.watch([delivery("later")], received_at=half_time_in(3600))
    heartbeat.watch([delivery("sooner")], received_at=half_time_in(0))
    wait_until(lambda: source.times_extended("sooner"))
    assert source.times_extended("later") == 0


def test_a_delivery_that_was_forgotten_is_left_alone(heartbeat: VisibilityHeartbeat, source: FakeSource) -> None:
    settled, slow = delivery("settled"), delivery("slow")
    source.visibility_seconds = 0.2
    heartbeat.watch([settled, slow], received_at=time.monotonic())
    heartbeat.forget([settled, delivery("never watched")])
    # Both would have been due at the same moment, so two extensions of one are proof enough for the other.
    wait_until(lambda: source.times_extended("slow") >= 2)
    assert source.times_extended("settled") == 0


def test_a_refusal_is_reported_once_and_the_others_go_on(
    heartbeat: VisibilityHeartbeat, source: FakeSource, reported: list[tuple[str, str]]
) -> None:
    source.visibility_seconds = 0.2
    source.answer = lambda deliveries: {one.receipt: "expired" for one in deliveries if one.receipt == "lost"}
    heartbeat.watch([delivery("lost"), delivery("slow")], received_at=time.monotonic())
    wait_until(lambda: source.times_extended("slow") >= 3)
    assert source.times_extended("lost") == 1
    assert reported == [("lost", "expired")]


def test_the_refusal_of_a_delivery_that_was_settled_meanwhile_is_no_news(
    heartbeat: VisibilityHeartbeat, source: FakeSource, reported: list[tuple[str, str]]
) -> None:
    settled, slow = delivery("settled"), delivery("slow")

    def settle_during_the_call(deliveries: Sequence[Delivery]) -> Mapping[str, str]:
        heartbeat.forget([settled])
        return {"settled": "it was deleted", "slow": "expired"}

    source.answer = settle_during_the_call
    heartbeat.watch([settled, slow], received_at=half_time_in(0))
    wait_until(lambda: reported)
    assert reported == [("slow", "expired")]


@pytest.mark.parametrize("trouble", [BrokerError("SQS is away"), RuntimeError("not foreseen")])
def test_a_call_that_failed_is_reported_and_tried_again_long_before_the_time_is_over(
    heartbeat: VisibilityHeartbeat, source: FakeSource, reported: list[tuple[str, str]], trouble: Exception
) -> None:
    def fail_once(deliveries: Sequence[Delivery]) -> Mapping[str, str]:
        if len(source.calls) == 1:
            raise trouble
        return {}

    source.answer = fail_once
    heartbeat.watch([delivery("slow")], received_at=half_time_in(0))
    wait_until(lambda: len(source.calls) == 2)
    assert reported == [("slow", str(trouble))]
    (first, _, _), (second, _, _) = source.calls
    assert second - first < HALF_TIME / 2, "half of the time is left when the first call fails"


def test_no_error_ends_the_thread(source: FakeSource) -> None:
    """Not of the source, whose text cannot be told, and not of those who are told of it."""

    class Unprintable(BrokerError):
        def __str__(self) -> str:
            raise ValueError("no text for you")

    def answer(deliveries: Sequence[Delivery]) -> Mapping[str, str]:
        if len(source.calls) == 1:
            raise Unprintable("x")
        if len(source.calls) == 2:
            raise SystemExit(1)
        return {}

    def tell(_delivery: Delivery, why: str) -> None:
        told.append(why)
        raise SystemExit(1)

    told: list[str] = []
    source.answer = answer
    heartbeat = VisibilityHeartbeat(source, tell)
    heartbeat.start()
    heartbeat.watch([delivery("a")], time.monotonic() - HALF_TIME)
    wait_until(lambda: len(source.calls) >= 3, "it goes on")
    assert told == ["Unprintable (str() of it raised ValueError)"]
    heartbeat.stop()


def test_stop_ends_the_thread_at_once(source: FakeSource) -> None:
    heartbeat = VisibilityHeartbeat(source, lambda delivery, why: None)
    heartbeat.start()
    heartbeat.watch([delivery("slow")], received_at=half_time_in(3600))
    begun = time.monotonic()
    heartbeat.stop()
    assert time.monotonic() - begun < 5
    assert not any(thread.name == "txbox-heartbeat" for thread in threading.enumerate())


def test_nothing_runs_where_deliveries_never_end(source: FakeSource) -> None:
    source.visibility_seconds = None
    heartbeat = VisibilityHeartbeat(source, lambda delivery, why: None)
    heartbeat.start()
    heartbeat.watch([delivery("slow")], received_at=0.0)
    assert not any(thread.name == "txbox-heartbeat" for thread in threading.enumerate())
    heartbeat.stop()
    assert source.calls == []
