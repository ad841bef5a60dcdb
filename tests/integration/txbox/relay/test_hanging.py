"""Destinations that hang keep nothing from those that answer; and no error ends a thread of a relay."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

from integration.txbox.conftest import StartRelay
from support.txbox.outbox import OWN, numbered, publish
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from txbox import BrokerError, Outgoing

HEALTHY = "own:healthy"


class Hanging(RecordingPublisher):
    """Never answers for some destinations, until it is freed.

    Attributes:
        waits: how many calls hang now, and how many did at most.
    """

    def __init__(self, hangs: Callable[[str], bool]) -> None:
        super().__init__()
        self.freed = threading.Event()
        self.hangs = hangs
        self.now = self.most = 0
        self.latencies: list[float] = []
        self._counting = threading.Lock()

    def send(self, messages: Any) -> Any:
        if self.hangs(messages[0].destination):
            with self._counting:
                self.now += 1
                self.most = max(self.most, self.now)
            self.freed.wait(60)
            with self._counting:
                self.now -= 1
            raise BrokerError("it never answered")
        answer = super().send(messages)
        self.latencies += [time.monotonic() - float(message.headers["at"]) for message in messages]
        return answer


def publish_now(engine: Engine, destination: str) -> None:
    publish(engine, Outgoing(destination, "x", headers={"at": str(time.monotonic())}))


def usual_seconds(engine: Engine, broker: Hanging) -> float:
    """Send twenty messages while nothing hangs; return how long one may take later: on a busy machine, longer."""
    for _ in range(20):
        publish_now(engine, HEALTHY)
    broker.wait_for(20)
    longest = max(1.0, 3 * max(broker.latencies))
    broker.latencies.clear()
    return longest


@pytest.fixture
def pooled(engine: Engine) -> Iterator[Engine]:
    """An engine with the pool that an engine has by default: of 5, and 10 more."""
    made = create_engine(engine.url)
    yield made
    made.dispose()


@pytest.mark.parametrize("count", [3, 40])
def test_destinations_that_hang_keep_nothing_from_one_that_answers(
    pooled: Engine, start_relay: StartRelay, count: int
) -> None:
    broker = Hanging(lambda destination: destination != HEALTHY)
    relay = start_relay(broker, engine=pooled)
    usual = usual_seconds(pooled, broker)
    for number in range(count):
        publish(pooled, *numbered(100, to=f"own:hangs-{number}"))
    wait_until(lambda: broker.now >= 3, "some hang")
    for _ in range(40):
        publish_now(pooled, HEALTHY)
        time.sleep(0.02)  # the pace of a service, not a wait
    broker.wait_for(60)
    assert statistics.median(broker.latencies) < usual
    assert max(broker.latencies) < 20.0, "none has waited for one that hangs"
    assert broker.most <= 6, "no more than three quarters of the pool's connections, less two and the usual senders"
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("txbox-relay-")]) <= 11
    assert relay.running
    broker.freed.set()


def test_one_that_begins_to_hang_while_it_is_busy_has_no_more_senders_and_those_that_answer_go_on(
    pooled: Engine, start_relay: StartRelay
) -> None:
    hung = False
    broker = Hanging(lambda destination: hung and destination != HEALTHY)
    start_relay(broker, engine=pooled)
    usual = usual_seconds(pooled, broker)
    publish_now(pooled, "own:busy")
    broker.wait_for(21)
    hung = True
    for _ in range(30):
        publish_now(pooled, "own:busy")
    wait_until(lambda: broker.now, "it hangs")
    for _ in range(30):
        publish_now(pooled, "own:busy")
        publish_now(pooled, HEALTHY)
    broker.wait_for(51)
    assert statistics.median(broker.latencies) < usual
    assert broker.most <= 4, "as many as were under way before the first of them took too long"
    broker.freed.set()


def test_a_destination_that_answers_again_is_quick_again(pooled: Engine, start_relay: StartRelay) -> None:
    broker = Hanging(lambda _: not broker.freed.is_set())
    start_relay(broker, engine=pooled)
    publish_now(pooled, HEALTHY)
    wait_until(lambda: broker.now, "it hangs")
    broker.freed.set()
    broker.wait_for(1)
    for _ in range(20):
        publish_now(pooled, HEALTHY)
    broker.wait_for(21)
    assert statistics.median(broker.latencies) < 1.0


class Unprintable(BrokerError):
    """An error that cannot be told of."""

    def __str__(self) -> str:
        raise ValueError("no text for you")


@pytest.mark.parametrize("cause", ["publisher", "count"])
def test_no_error_ends_a_sender_and_running_says_what_is(
    engine: Engine, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    failures = 12
    broken = True

    def fail(_: object) -> None:
        nonlocal failures
        if failures > 0:
            failures -= 1
            if cause == "publisher":
                raise Unprintable("x")

    def report(*arguments: Any) -> Any:
        if broken and failures > 0:
            raise SystemExit(1)  # of a thread: it would end without a word
        return reported(*arguments)

    broker = RecordingPublisher(before=fail)
    relay = start_relay(broker)
    reported = relay._report
    if cause == "count":
        monkeypatch.setattr(relay, "_report", report)
    for number in range(12):
        publish(engine, *numbered(1, to=f"own:{number}"))
    broker.wait_for(12)
    assert relay.running
    assert not [thread for thread in relay._threads if not thread.is_alive()]
    publish(engine, *numbered(1, to=OWN))
    broker.wait_for(13)
