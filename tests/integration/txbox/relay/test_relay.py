"""The relay sends what was committed: all of it, in order per key, whatever single messages do."""

import time
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event

from integration.txbox.conftest import BOTH_KINDS, Left, StartRelay
from support.postgres.statements import run
from support.txbox.outbox import OWN, letters, numbered, publish
from support.txbox.publishers import RecordingPublisher, first_arrivals
from support.waiting import wait_until
from txbox import InvalidConfiguration, Outgoing
from txbox.instrumentation import Event, Relayed, Stopped
from txbox.relay import OutboxMessage, Refused, Relay
from txbox.status import read_activity

# --- all goes well ---------------------------------------------------------------------------------------------------


@BOTH_KINDS
def test_what_waits_and_what_comes_is_sent_once_and_forgotten(
    engine: Engine, start_relay: StartRelay, left: Left
) -> None:
    broker = RecordingPublisher()
    before = publish(engine, *numbered(300))
    start_relay(broker)
    broker.wait_for(300)
    after = publish(engine, *numbered(300, first=300))
    broker.wait_for(600)
    wait_until(lambda: left() == [], "an empty outbox")
    assert sorted(message.id for message in broker.received) == sorted([*before, *after])


def test_a_message_arrives_as_it_was_published(engine: Engine, start_relay: StartRelay) -> None:
    broker = RecordingPublisher()
    headers = {"Tenant": "Zürich", "quote": "\"'\\", "count": "7", "json": '{"a": 1}'}
    publish(engine, Outgoing(OWN, b"\0\xff body", key="k", headers=headers, message_id="order-17"))
    start_relay(broker)
    broker.wait_for(1)
    message = broker.received[0]
    assert message == OutboxMessage("order-17", OWN, b"\0\xff body", "k", headers, 0, message.published_at)
    assert message.published_at is not None


@BOTH_KINDS
def test_each_key_keeps_its_order(engine: Engine, start_relay: StartRelay) -> None:
    broker = RecordingPublisher()
    expected: dict[str | None, list[str]] = {}
    for number in range(400):
        key = f"k{number % 13}"
        expected.setdefault(key, []).append(str(number))
        publish(engine, Outgoing(OWN, str(number), key=key))
        if number == 100:
            start_relay(broker, batch_size=7)
    broker.wait_for(400)
    assert first_arrivals(broker.received) == expected
    assert len(broker.received) == 400


def test_a_delayed_message_waits_for_its_time(engine: Engine, start_relay: StartRelay) -> None:
    broker = RecordingPublisher()
    start_relay(broker)
    begun = time.monotonic()
    publish(engine, Outgoing(OWN, "late", delay=0.7), Outgoing(OWN, "much later", delay=3_600), Outgoing(OWN, "now"))
    broker.wait_for(2)
    assert broker.bodies == ["now", "late"]
    assert time.monotonic() - begun >= 0.7


@BOTH_KINDS
def test_a_large_backlog_is_read_in_pieces(
    engine: Engine, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Relay, "batch_bytes", 10_000)
    broker = RecordingPublisher()
    publish(engine, *[Outgoing(OWN, b"x" * 1_000, key=f"k{number % 5}") for number in range(200)])
    start_relay(broker, senders=1)
    broker.wait_for(200)
    assert max(broker.calls) <= 10


@BOTH_KINDS
def test_a_message_larger_than_a_batch_is_sent_all_the_same(
    engine: Engine, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Relay, "batch_bytes", 1)
    broker = RecordingPublisher()
    publish(engine, *[Outgoing(OWN, b"x" * 5_000) for _ in range(3)])
    start_relay(broker)
    broker.wait_for(3)


@BOTH_KINDS
def test_a_burst_beyond_what_a_look_takes_in_is_sent_whole(engine: Engine, start_relay: StartRelay) -> None:
    broker = RecordingPublisher()
    start_relay(broker)
    publish(engine, *[Outgoing(OWN, "", key=f"k{number % 50}") for number in range(12_000)])
    broker.wait_for(12_000)


# --- what it is asked to keep, and how it lives ----------------------------------------------------------------------


def test_what_was_sent_is_kept_for_as_long_as_asked(engine: Engine, start_relay: StartRelay) -> None:
    broker = RecordingPublisher()
    ids = publish(engine, Outgoing(OWN, b"\0body", key="k", headers={"a": "b"}), Outgoing(OWN, "two"))
    relay = start_relay(broker, keep_sent=timedelta(hours=1))
    broker.wait_for(2)
    assert relay.stop()
    with engine.connect() as connection:
        kept = connection.exec_driver_sql(
            "SELECT message_id, destination, key, headers, body FROM outbox_sent ORDER BY position"
        ).all()
    assert [tuple(row) for row in kept] == [(ids[0], OWN, "k", {"a": "b"}, b"\0body"), (ids[1], OWN, None, {}, b"two")]
    run(engine, "UPDATE outbox_sent SET sent_at = sent_at - interval '2 hours' WHERE key = 'k'")
    start_relay(broker, keep_sent=timedelta(hours=1))

    def remaining() -> list[str]:
        with engine.connect() as connection:
            return list(connection.exec_driver_sql("SELECT message_id FROM outbox_sent").scalars())

    wait_until(lambda: remaining() == [ids[1]], "the old one is forgotten")


def test_it_can_be_started_again(engine: Engine, start_relay: StartRelay) -> None:
    broker = RecordingPublisher()
    relay = start_relay(broker)
    with pytest.raises(InvalidConfiguration, match="running already"):
        relay.start()
    relay.stop()
    publish(engine, *numbered(3))
    relay.start()
    broker.wait_for(3)
    wait_until(lambda: relay.sent == 3, "the count")


def test_events_tell_what_became_of_a_batch(engine: Engine, start_relay: StartRelay) -> None:
    heard: list[Event] = []
    broker = RecordingPublisher(lambda message: "no" if message.body == b"1" else None)
    publish(engine, *numbered(3))
    relay = start_relay(broker, max_attempts=2, hooks=[heard.append])
    wait_until(lambda: letters(engine), "a dead letter")
    relay.stop()
    told = [event for event in heard if isinstance(event, Relayed)]
    assert sum(event.sent for event in told) == 2
    assert sum(event.postponed for event in told) == 1
    assert sum(event.parked for event in told) == 1
    assert {event.source for event in told} == {OWN}
    assert {event.error for event in told if event.postponed or event.parked} == {"no"}
    lags = [event.lag_seconds for event in told if event.sent]
    assert all(lag is not None and 0 <= lag < 60 for lag in lags)
    assert heard[-1] == Stopped("txbox:outbox", "outbox_message", drained=True)
    assert (relay.sent, relay.failed) == (2, 2)


def test_a_stop_finishes_what_is_being_sent_and_leaves_the_rest(
    engine: Engine, start_relay: StartRelay, left: Left
) -> None:
    broker = RecordingPublisher(before=lambda _: relay.stop(0))
    publish(engine, *numbered(100))
    relay = Relay(engine, {"own": broker}, senders=1, batch_size=10)
    relay.start()
    wait_until(lambda: not relay.running, "its end")
    assert broker.calls == [10]
    assert len(left()) == 90


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_the_hosts_isolation_level_makes_no_difference(engine: Engine, start_relay: StartRelay, level: str) -> None:
    options = f"{engine.url.query['options']} -cdefault_transaction_isolation={level.replace(' ', chr(92) + ' ')}"
    own = create_engine(engine.url.update_query_dict({"options": options}), isolation_level=level)
    broker = RecordingPublisher(lambda message: "later" if message.attempts == 0 else None)
    relay = start_relay(broker, engine=own)
    for number in range(10):
        publish(own, Outgoing(OWN, str(number), key=f"k{number % 2}"))
    broker.wait_for(10)
    assert first_arrivals(broker.received) == {"k0": ["0", "2", "4", "6", "8"], "k1": ["1", "3", "5", "7", "9"]}
    relay.stop()
    own.dispose()


@pytest.mark.parametrize("level", ["AUTOCOMMIT", "SERIALIZABLE"])
@pytest.mark.parametrize("listens", [False, True])
def test_the_level_of_an_engine_makes_no_difference(
    engine: Engine, start_relay: StartRelay, left: Left, level: Any, listens: bool
) -> None:
    own = create_engine(engine.url, isolation_level=level)
    levels: set[str] = set()
    if listens:  # before our BEGIN, which then is too late to choose a level

        @event.listens_for(own, "begin")
        def begun(connection: Connection) -> None:
            levels.add(connection.exec_driver_sql("SHOW transaction_isolation").scalar_one())

    broker = RecordingPublisher(lambda message: "later" if message.attempts == 0 else None)
    relay = start_relay(broker, engine=own)
    publish(engine, *numbered(10, key="a"))
    broker.wait_for(10)
    assert broker.bodies == [str(number) for number in range(10)]
    wait_until(lambda: not left(), "the last settlement")
    relay.stop()
    own.dispose()
    assert "serializable" not in levels


def test_a_publisher_that_answers_with_copies_is_understood(engine: Engine, start_relay: StartRelay) -> None:
    class Copying(RecordingPublisher):
        def send(self, messages: Any) -> Any:
            return [Refused(OutboxMessage(one.message.id, OWN, b""), "no") for one in super().send(messages)]

    broker = Copying(lambda message: "no" if message.attempts == 0 and message.body == b"1" else None)
    publish(engine, *numbered(3, key="a"))
    start_relay(broker)
    broker.wait_for(3)
    assert broker.bodies == ["0", "1", "2"]


def test_what_a_relay_has_sent_is_reported_of_each_minute(engine: Engine, start_relay: StartRelay) -> None:
    broker = RecordingPublisher()
    relay = start_relay(broker)
    publish(engine, *numbered(300), *numbered(50, to="own:elsewhere"))
    broker.wait_for(350)
    wait_until(lambda: relay.sent == 350)
    assert relay.stop(20)
    relay.start()  # it counts on, and adds what is new
    publish(engine, *numbered(10))
    broker.wait_for(360)
    wait_until(lambda: relay.sent == 360)
    assert relay.stop(20)
    with engine.connect() as connection:
        series = [*read_activity(connection, "destination"), *read_activity(connection, "outbox")]
    assert {(one.name, one.figure): sum(one.counts) for one in series} == {
        (OWN, "sent"): 310,
        ("own:elsewhere", "sent"): 50,
        ("", "sent"): 360,
    }
