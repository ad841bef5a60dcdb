"""Publishers that are slow, mistaken, or do not return."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine

from integration.txbox.conftest import BOTH_KINDS, Left, StartRelay
from support.txbox.outbox import OWN, held, publish
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from txbox import Outgoing
from txbox.backoff import Backoff
from txbox.instrumentation import Event, PublisherOverdue
from txbox.outbox.status import read_outbox_status
from txbox.relay import OutboxMessage, PartlySent, Refused, Relay


def test_a_publisher_that_is_slower_than_its_timeout_is_given_less_at_a_time(
    engine: Engine, start_relay: StartRelay, left: Left
) -> None:
    # A broker that takes 30 ms for each: 50 of them take longer than the timeout.
    broker = RecordingPublisher(before=lambda messages: time.sleep(0.03 * len(messages)))
    publish(engine, *[Outgoing(OWN, str(number)) for number in range(100)])
    start_relay(broker, publish_timeout_seconds=1, senders=2)
    wait_until(lambda: left() == [], "an empty outbox", timeout=60)
    times = Counter(message.id for message in broker.received)
    assert len(times) == 100
    assert max(times.values()) <= 3, "until it has learned"


def test_a_publisher_that_does_not_return_is_told_of(engine: Engine, start_relay: StartRelay, left: Left) -> None:
    def said() -> dict[str, str]:
        return {where: why for relay in read_outbox_status(engine).relays for where, why in relay.outages.items()}

    freed = threading.Event()
    broker = RecordingPublisher(after=lambda: len(broker.calls) > 1 or freed.wait(30))
    heard: list[Event] = []
    publish(engine, Outgoing(OWN, "one"))
    start_relay(broker, publish_timeout_seconds=1, senders=1, hooks=[heard.append])
    wait_until(lambda: said() == {OWN: "its publisher has not returned for 1 s"}, "the status says why nothing is sent")
    freed.set()
    broker.wait_for(2)  # its claim was lost
    wait_until(lambda: left() == [] and said() == {}, "nothing is left, and nothing is said any more")
    overdue = [event for event in heard if isinstance(event, PublisherOverdue)]
    assert [(event.source, event.messages) for event in overdue] == [(OWN, 1)], "told once"


@BOTH_KINDS
def test_held_keys_that_come_due_together_are_no_larger_batch(engine: Engine, start_relay: StartRelay) -> None:
    closed = True
    broker = RecordingPublisher(lambda _: "closed" if closed else None)
    publish(engine, *[Outgoing(OWN, str(number), key=f"k{number}") for number in range(300)])
    # Shorter waits would bring the first keys back before a slow machine has tried the last ones.
    start_relay(broker, batch_size=20, max_attempts=None, backoff=Backoff(2, 2))
    wait_until(lambda: held(engine) == 300, "all keys are held")
    closed = False
    broker.wait_for(300)
    assert max(broker.calls) <= 20


@BOTH_KINDS
def test_a_publisher_that_refuses_what_it_was_not_given_has_sent_nothing(
    engine: Engine, start_relay: StartRelay
) -> None:
    class Mistaken(RecordingPublisher):
        def send(self, messages: Any) -> Any:
            super().send(messages)
            return [Refused(OutboxMessage("another", OWN, b""), "no")] if messages[0].attempts == 0 else ()

    broker = Mistaken()
    publish(engine, Outgoing(OWN, "one"))
    start_relay(broker)
    broker.wait_for(2)
    assert [message.attempts for message in broker.received] == [0, 1]


@BOTH_KINDS
def test_an_outage_with_nonsense_in_it_is_an_outage_of_everything(engine: Engine, start_relay: StartRelay) -> None:
    class Mistaken(RecordingPublisher):
        def send(self, messages: Any) -> Any:
            super().send(messages)
            if len(self.calls) == 1:
                raise PartlySent("half", unsent=[OutboxMessage("another", OWN, b"")])
            return ()

    broker = Mistaken()
    publish(engine, Outgoing(OWN, "one"))
    start_relay(broker)
    broker.wait_for(2)
    assert [message.attempts for message in broker.received] == [0, 0]


@BOTH_KINDS
def test_a_stop_ends_a_long_batch_of_one_key_and_settles_what_was_sent(
    engine: Engine, start_relay: StartRelay, left: Left
) -> None:
    def send_slowly(messages: Sequence[OutboxMessage]) -> None:
        if messages[0].body == b"5":
            wait_until(lambda: any(relay._stopping.is_set() for relay in relays), "it is told to stop in its batch")

    relays: list[Relay] = []
    broker = RecordingPublisher(before=send_slowly)
    publish(engine, *[Outgoing(OWN, str(number), key="a") for number in range(500)])
    relays.append(start_relay(broker))
    broker.wait_for(5)
    assert relays[0].stop(60)
    assert len(broker.received) < 500
    assert len(left()) == 500 - len(broker.received)
