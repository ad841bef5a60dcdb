"""What publishers do: they refuse, lose their broker, are slow or mistaken. Each holds up its own, and nothing else."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Engine

from integration.txbox.conftest import BOTH_KINDS, Left, StartRelay
from support.txbox.outbox import OUTBOX, OWN, held, letters, numbered, publish
from support.txbox.publishers import RecordingPublisher, first_arrivals
from support.waiting import wait_until
from txbox import BrokerError, DeadLetters, Outgoing
from txbox.backoff import Backoff
from txbox.instrumentation import BrokerLost, BrokerRestored, Event, PublisherOverdue
from txbox.outbox.status import read_outbox_status
from txbox.relay import OutboxMessage, PartlySent, Refused, Relay

# --- messages that are refused ---------------------------------------------------------------------------------------


@BOTH_KINDS
def test_a_refused_message_holds_its_own_key_and_no_other(engine: Engine, start_relay: StartRelay, left: Left) -> None:
    closed = True
    broker = RecordingPublisher(lambda message: "closed" if closed and message.body == b"bad" else None)
    publish(engine, Outgoing(OWN, "before", key="a"), Outgoing(OWN, "bad", key="a"), Outgoing(OWN, "behind", key="a"))
    start_relay(broker, max_attempts=None)
    publish(engine, Outgoing(OWN, "other", key="b"), Outgoing(OWN, "keyless"))
    broker.wait_for(3)
    wait_until(lambda: len(broker.refused) >= 3, "it was tried again and again")
    publish(engine, Outgoing(OWN, "far behind", key="a"))
    wait_until(lambda: len(broker.refused) >= 5, "and again")
    wait_until(lambda: left() == ["bad", "behind", "far behind"], "everything else settled")
    closed = False
    broker.wait_for(6)
    assert first_arrivals(broker.received)["a"] == ["before", "bad", "behind", "far behind"]
    attempts = [message.attempts for message in broker.received if message.body == b"bad"]
    assert attempts == [len(broker.refused)]
    wait_until(lambda: left() == [], "an empty outbox")


@BOTH_KINDS
def test_a_refused_message_without_a_key_comes_again_and_holds_nobody(engine: Engine, start_relay: StartRelay) -> None:
    broker = RecordingPublisher(lambda message: "later" if message.body == b"3" and message.attempts < 3 else None)
    publish(engine, *numbered(10))
    start_relay(broker)
    broker.wait_for(10)
    assert sorted(broker.bodies) == sorted(map(str, range(10)))
    assert broker.bodies[-1] == "3"
    assert [message.attempts for message in broker.refused] == [0, 1, 2]


@BOTH_KINDS
def test_after_its_last_attempt_a_message_is_a_dead_letter_and_its_key_goes_on(
    engine: Engine, start_relay: StartRelay, left: Left
) -> None:
    broker = RecordingPublisher(lambda message: "never\0mind" if message.body == b"bad" else None)
    [bad] = publish(engine, Outgoing(OWN, "bad", key="a", headers={"tenant": "7"}))
    publish(engine, Outgoing(OWN, "next", key="a"), Outgoing(OWN, "and next", key="a"))
    start_relay(broker, max_attempts=3)
    broker.wait_for(2)
    assert broker.bodies == ["next", "and next"]
    assert [message.attempts for message in broker.refused] == [0, 1, 2]
    wait_until(lambda: left() == [], "an empty outbox")
    [letter] = DeadLetters(engine).list()
    assert (letter.message_id, letter.subscriber_id, letter.source) == (bad, f"txbox:outbox:{OWN}", OWN)
    assert (letter.body, letter.headers, letter.envelope) == (b"bad", {"tenant": "7"}, {"outbox": {"key": "a"}})
    assert (letter.attempts, letter.error) == (3, "never�mind")


@BOTH_KINDS
def test_a_final_refusal_is_a_dead_letter_at_once(engine: Engine, start_relay: StartRelay) -> None:
    broker = RecordingPublisher(lambda message: "no such thing" if message.body == b"bad" else None, final=True)
    publish(engine, Outgoing(OWN, "bad", key="a"), Outgoing(OWN, "next", key="a"), Outgoing(OWN, "bad"))
    start_relay(broker)
    broker.wait_for(1)
    wait_until(lambda: len(letters(engine)) == 2, "two dead letters")
    assert [message.attempts for message in broker.refused] == [0, 0]


def test_one_id_to_two_destinations_is_two_dead_letters(engine: Engine, start_relay: StartRelay) -> None:
    broker = RecordingPublisher(lambda _: "no", final=True)
    publish(engine, Outgoing("own:x", "same", message_id="m-1"), Outgoing("own:y", "same", message_id="m-1"))
    start_relay(broker)
    wait_until(lambda: len(letters(engine)) == 2, "two dead letters")
    assert letters(engine) == [("txbox:outbox:own:x", "no", 1), ("txbox:outbox:own:y", "no", 1)]


def test_a_dead_letter_is_published_again_under_its_id(engine: Engine, start_relay: StartRelay) -> None:
    closed = True
    broker = RecordingPublisher(lambda _: "closed" if closed else None, final=True)
    [bad] = publish(engine, Outgoing(OWN, "bad", key="a", headers={"tenant": "7"}))
    start_relay(broker)
    wait_until(lambda: letters(engine), "a dead letter")
    closed = False
    [letter] = DeadLetters(engine).list()
    assert DeadLetters(engine).republish(letter.dead_letter_id, OUTBOX).message_id == bad
    broker.wait_for(1)
    [message] = broker.received
    assert (message.id, message.key, message.body, message.headers) == (bad, "a", b"bad", {"tenant": "7"})
    assert DeadLetters(engine).list() == []


@BOTH_KINDS
def test_a_publisher_that_raises_has_refused_them_all(engine: Engine, start_relay: StartRelay) -> None:
    errors: list[type[BaseException]] = [ValueError, SystemExit]

    def fail(messages: Sequence[OutboxMessage]) -> None:
        for message in messages:
            if message.attempts < len(errors):
                raise errors[message.attempts]("a mistake of the host's")

    broker = RecordingPublisher(before=fail)
    publish(engine, *numbered(3, key="a"))
    start_relay(broker)
    broker.wait_for(3)
    assert broker.bodies == ["0", "1", "2"]


@BOTH_KINDS
def test_a_publisher_that_returns_nonsense_is_one_that_fails(
    engine: Engine, start_relay: StartRelay, left: Left
) -> None:
    """Most of all the refused messages themselves: taken for an outage, they would be sent for ever."""

    class Mistaken(RecordingPublisher):
        def send(self, messages: Any) -> Any:
            super().send(messages)
            return {"own:messages": list(messages), "own:texts": ["no"], "own:true": True}[messages[0].destination]

    publish(engine, *[Outgoing(f"own:{answer}", "x") for answer in ("messages", "texts", "true") for _ in range(2)])
    start_relay(Mistaken(), max_attempts=2)
    wait_until(lambda: len(letters(engine)) == 6, "six dead letters")
    assert left() == []
    assert all("TypeError" in error for _, error, _ in letters(engine))


@BOTH_KINDS
def test_a_publisher_may_return_nothing(engine: Engine, start_relay: StartRelay, left: Left) -> None:
    class Silent(RecordingPublisher):
        def send(self, messages: Any) -> Any:
            super().send(messages)

    broker = Silent()
    publish(engine, *numbered(2))
    start_relay(broker)
    broker.wait_for(2)
    wait_until(lambda: left() == [], "an empty outbox")


@BOTH_KINDS
def test_a_row_that_nobody_published_is_parked_and_holds_up_nothing(engine: Engine, start_relay: StartRelay) -> None:
    insert = "INSERT INTO outbox_message (lane, message_id, destination, headers, body) VALUES (1, %s, %s, %s, 'x')"
    with engine.begin() as connection:
        connection.exec_driver_sql(insert, ("by hand", "no destination", "{}"))
        for number, headers in enumerate(("[]", '"x"', '{"a": 1}')):
            connection.exec_driver_sql(insert, (f"by hand too {number}", OWN, headers))
    broker = RecordingPublisher()
    publish(engine, *numbered(3))
    start_relay(broker)
    broker.wait_for(3)
    wait_until(lambda: len(letters(engine)) == 4, "four dead letters")


# --- a broker that is away -------------------------------------------------------------------------------------------


@BOTH_KINDS
def test_an_outage_is_nobodys_fault_and_holds_up_its_own_destination_only(
    engine: Engine, start_relay: StartRelay
) -> None:
    away = True
    heard: list[Event] = []

    def fail(messages: Sequence[OutboxMessage]) -> None:
        if away and messages[0].destination == "own:away":
            raise BrokerError("not today")

    broker = RecordingPublisher(before=fail)
    publish(engine, *numbered(5, to="own:away", key="a"), *numbered(5, to="own:there", key="a"))
    start_relay(broker, max_attempts=1, hooks=[heard.append])
    broker.wait_for(5)
    assert {message.destination for message in broker.received} == {"own:there"}
    wait_until(lambda: sum(isinstance(event, BrokerLost) for event in heard) >= 2, "two tries")
    away = False
    broker.wait_for(10)
    assert [message.body for message in broker.received[5:]] == [b"0", b"1", b"2", b"3", b"4"]
    assert {message.attempts for message in broker.received} == {0}
    assert letters(engine) == []
    wait_until(lambda: any(isinstance(event, BrokerRestored) for event in heard), "the good news")
    assert {event.source for event in heard if isinstance(event, BrokerLost)} == {"own:away"}


@BOTH_KINDS
def test_what_was_confirmed_before_an_outage_is_not_sent_again(engine: Engine, start_relay: StartRelay) -> None:
    class Half(RecordingPublisher):
        def send(self, messages: Any) -> Any:
            if len(messages) < 4:
                return super().send(messages)
            super().send(messages[: len(messages) // 2])
            raise PartlySent("half", unsent=messages[len(messages) // 2 :], refused=())

    broker = Half()
    ids = publish(engine, *numbered(64))
    start_relay(broker)
    broker.wait_for(64, timeout=60)
    assert sorted(message.id for message in broker.received) == sorted(ids)


@BOTH_KINDS
def test_a_kind_without_a_publisher_waits_and_says_so(
    engine: Engine, start_relay: StartRelay, left: Left, caplog: pytest.LogCaptureFixture
) -> None:
    broker = RecordingPublisher()
    publish(engine, Outgoing("kafka:purchases", "waits"), Outgoing(OWN, "goes"))
    start_relay(broker, max_attempts=1)
    broker.wait_for(1)
    wait_until(lambda: "no publisher for 'kafka'" in caplog.text, "a word in the log")
    wait_until(lambda: left() == ["waits"], "the other one settled")
    assert letters(engine) == []


@BOTH_KINDS
def test_a_busy_destination_leaves_others_their_turn(engine: Engine, start_relay: StartRelay) -> None:
    order: list[str] = []
    had_its_turn = threading.Event()

    def send(messages: Sequence[OutboxMessage]) -> None:
        order.append(messages[0].destination)
        if messages[0].destination == "own:quiet":
            had_its_turn.set()
        elif order.count("own:busy") == 20:  # of 60: on a busy machine, another sender may need that long to start
            had_its_turn.wait(10)

    broker = RecordingPublisher(before=send)
    publish(engine, *numbered(3_000, to="own:busy"), *numbered(1, to="own:quiet"))
    start_relay(broker, senders=1, batch_size=50)
    broker.wait_for(3_001)
    assert order.index("own:quiet") < len(order) / 2


# --- a publisher that is slow, mistaken, or does not return ----------------------------------------------------------


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
