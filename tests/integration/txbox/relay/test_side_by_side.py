"""Several relays on one outbox: none waits for another, no key is in two hands, what one leaves another takes up."""

import threading
import time
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

from integration.txbox.conftest import QUICK, Left, StartRelay
from support.txbox.outbox import OUTBOX, OWN, publish
from support.txbox.publishers import Awaited, FailingPublisher, RecordingPublisher, first_arrivals
from support.waiting import wait_until
from txbox import Outgoing
from txbox.relay import Relay

pytestmark = pytest.mark.usefixtures("all_polls")


class Gate(RecordingPublisher):
    """Lets no call through before it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.opened = threading.Event()

    def send(self, messages: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(30)
        return super().send(messages)


def test_a_relay_takes_what_another_has_not_in_hand_and_waits_for_nobody(
    engine: Engine, start_relay: StartRelay
) -> None:
    slow, quick = Gate(), RecordingPublisher()
    publish(engine, Outgoing(OWN, "slow", key="a"))
    start_relay(slow, senders=1)
    assert slow.reached.wait(60)
    start_relay(quick)
    publish(engine, Outgoing(OWN, "behind", key="a"), Outgoing(OWN, "other", key="b"))
    wait_until(lambda: quick.bodies + slow.bodies == ["other"], "the other key, by whoever is free")
    with engine.connect() as connection:
        waiting = connection.exec_driver_sql("SELECT count(*) FROM pg_locks WHERE NOT granted").scalar_one()
    assert waiting == 0
    slow.opened.set()
    wait_until(lambda: len(quick.received) + len(slow.received) == 3, "all three")
    order = first_arrivals([*slow.received, *quick.received])
    assert order["a"] == ["slow", "behind"]


def test_while_messages_are_on_their_way_no_snapshot_is_held(engine: Engine, start_relay: StartRelay) -> None:
    gate = Gate()
    publish(engine, Outgoing(OWN, "one"))
    start_relay(gate, senders=1)
    assert gate.reached.wait(60)
    query = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND {} IS NOT NULL"
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        for held in ("backend_xmin", "backend_xid"):  # the relay's report has them for a moment
            wait_until(
                lambda held=held: connection.exec_driver_sql(query.format(held)).scalar_one() == 0, f"none has {held}"
            )
    gate.opened.set()


def test_a_relay_that_stands_still_loses_its_messages_to_another_and_sends_no_more_of_them(
    engine: Engine, start_relay: StartRelay
) -> None:
    freed = threading.Event()
    stuck = RecordingPublisher(after=lambda: len(stuck.calls) > 1 or freed.wait(30))
    other = RecordingPublisher()
    publish(engine, *[Outgoing(OWN, str(number), key="a") for number in range(5)])
    start_relay(stuck, publish_timeout_seconds=1, senders=1)
    wait_until(lambda: stuck.calls, "the first message in its hands")
    start_relay(other)
    other.wait_for(5)
    assert other.bodies == ["0", "1", "2", "3", "4"]
    freed.set()
    with engine.begin() as connection:
        OUTBOX.publish(connection, OWN, "5", key="a")
    wait_until(lambda: "5" in stuck.bodies + other.bodies, "the next one")
    assert stuck.bodies in (["0"], ["0", "5"])


def test_a_killed_connection_sends_again_what_it_had_in_hand(engine: Engine, start_relay: StartRelay) -> None:
    def cut() -> None:
        if len(broker.calls) == 1:
            with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
                connection.exec_driver_sql(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE state = 'idle in transaction' AND datname = current_database() AND pid IN "
                    "(SELECT pid FROM pg_locks WHERE locktype = 'advisory')"
                )

    broker = RecordingPublisher(after=cut)
    publish(engine, Outgoing(OWN, "one", message_id="m-1"), Outgoing(OWN, "two", message_id="m-2"))
    start_relay(broker)
    broker.wait_for(4)
    assert sorted(message.id for message in broker.received) == ["m-1", "m-1", "m-2", "m-2"]


@pytest.mark.parametrize(("relays", "kind"), [(2, "sync"), (4, "sync"), (3, "async")])
def test_through_a_bad_day_nothing_is_lost_and_first_arrivals_keep_their_order(
    engine: Engine, schema_url: str, relays: int, kind: str, left: Left
) -> None:
    """A broker that refuses, is lost, and does not confirm; and connections of relays that are cut."""
    receiver = RecordingPublisher()
    brokers = [FailingPublisher(seed, trouble=0.15, receiver=receiver) for seed in range(relays)]
    engines = [create_engine(schema_url, pool_size=10) for _ in range(relays)]
    working = [
        Relay(
            own,
            {"own": Awaited(broker) if kind == "async" else broker},
            senders=2,
            batch_size=20,
            max_attempts=None,
            backoff=QUICK,
        )
        for own, broker in zip(engines, brokers, strict=True)
    ]
    for relay in working:
        relay.start()
    expected: dict[str | None, list[str]] = {}
    for number in range(600):
        key = f"k{number % 11}" if number % 5 else None
        expected.setdefault(key, []).append(str(number))
        publish(engine, Outgoing(OWN, str(number), key=key))
        if number % 150 == 149:
            with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
                connection.exec_driver_sql(
                    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid IN "
                    "(SELECT pid FROM pg_stat_activity WHERE datname = current_database()) LIMIT 1"
                )
    for broker in brokers:
        broker.calm()
    wait_until(lambda: left() == [], "an empty outbox", timeout=60)
    for relay, own in zip(working, engines, strict=True):
        assert relay.stop()
        own.dispose()
    arrived = first_arrivals(receiver.received)
    assert sorted(arrived.pop(None)) == sorted(expected.pop(None))
    assert arrived == expected


def test_relays_share_the_work(engine: Engine, start_relay: StartRelay) -> None:
    # A broker takes its time, and both begin together: one relay would be done before the other begins.
    both, begun = threading.Barrier(2), threading.local()

    def take_time(_: object) -> None:
        if not getattr(begun, "already", False):
            begun.already = True
            both.wait(60)
        time.sleep(0.03)

    brokers = [RecordingPublisher(before=take_time) for _ in range(2)]
    for broker in brokers:
        start_relay(broker, senders=1, batch_size=20)
    publish(engine, *[Outgoing(OWN, str(number)) for number in range(2_000)])
    wait_until(lambda: sum(len(broker.received) for broker in brokers) >= 2_000, "all messages")
    shares = [len(broker.received) for broker in brokers]
    assert sum(shares) == 2_000
    assert min(shares) > 200
