"""A paused destination: nothing is sent there, everything waits in its order, and others do not notice."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Engine

from integration.txbox.conftest import Left, StartRelay
from support.txbox.events import Kept
from support.txbox.outbox import OWN, numbered, publish
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from txbox import Outgoing
from txbox.instrumentation import Drained, Paused, Resumed
from txbox.operations.pauses import find_named, pause, resume
from txbox.outbox.lanes import number_of
from txbox.outbox.status import read_outbox_status
from txbox.relay import OutboxMessage, poller, reporter
from txbox.relay.pending import Claim, PendingLanes
from txbox.relay.sender import ClaimResult, Sender

OTHER = "own:elsewhere"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and reports every few milliseconds."""
    monkeypatch.setattr(poller, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(reporter, "SOON_SECONDS", 0.05)


def states(engine: Engine) -> list[str | None]:
    return [relay.state for relay in read_outbox_status(engine).relays]


def sent_to(broker: RecordingPublisher, destination: str) -> list[str]:
    return [message.body.decode() for message in broker.received if message.destination == destination]


def test_a_paused_destination_waits_and_others_go_on_in_all_relays(
    engine: Engine, start_relay: StartRelay, left: Left
) -> None:
    broker, kept = RecordingPublisher(), Kept()
    for _ in range(2):
        start_relay(broker, hooks=[kept])
    pause(engine, destination=OWN, by="anna", note="their upgrade")
    wait_until(lambda: states(engine) == ["drained", "drained"])
    publish(engine, *numbered(50, key="k"), *numbered(50, to=OTHER), Outgoing(OWN, "late", delay=0.01))
    broker.wait_for(50)
    publish(engine, *numbered(50, first=50, key="k"))
    wait_until(lambda: len(left()) == 101)
    assert sent_to(broker, OWN) == []
    assert {(one.source, one.paused_by, one.note) for one in kept.of(Paused)} == {(OWN, "anna", "their upgrade")}
    resume(engine, destination=OWN)
    wait_until(lambda: left() == [])
    assert [body for body in sent_to(broker, OWN) if body != "late"] == [str(number) for number in range(100)]
    assert len(broker.received) == 151, "none is sent twice"
    wait_until(lambda: states(engine) == ["working", "working"])
    for kind in (Paused, Drained, Resumed):
        assert [one.source for one in kept.of(kind)] == [OWN, OWN]


def test_what_a_batch_has_not_sent_yet_stays_when_its_destination_is_paused(
    engine: Engine, start_relay: StartRelay, left: Left
) -> None:
    began, go = threading.Event(), threading.Event()

    def hang(messages: Sequence[OutboxMessage]) -> None:
        if messages[0].body == b"1":
            began.set()
            assert go.wait(30)

    broker, kept = RecordingPublisher(before=hang), Kept()
    publish(engine, *numbered(20, key="k"))
    start_relay(broker, hooks=[kept])
    assert began.wait(20)
    pause(engine, destination=OWN, by="anna")
    wait_until(lambda: states(engine) == ["paused"])
    assert kept.of(Drained) == []
    go.set()
    wait_until(lambda: states(engine) == ["drained"])
    assert broker.bodies == ["0", "1"]
    assert len(left()) == 18
    resume(engine, destination=OWN)
    wait_until(lambda: left() == [])
    assert broker.bodies == [str(number) for number in range(20)]


def test_a_relay_that_starts_meanwhile_sends_nothing_there(engine: Engine, start_relay: StartRelay, left: Left) -> None:
    publish(engine, *numbered(300), *numbered(10, to=OTHER))
    pause(engine, destination=OWN, by="anna")
    broker = RecordingPublisher()
    relay = start_relay(broker)
    broker.wait_for(10)
    wait_until(lambda: states(engine) == ["drained"])
    assert relay.stop(20)
    relay.start()  # a restart
    wait_until(lambda: states(engine) == ["drained"])
    assert len(left()) == 300
    resume(engine, destination=OWN)
    wait_until(lambda: left() == [])
    assert len(broker.received) == 310


def test_messages_that_were_refused_wait_too_and_keep_their_order(
    engine: Engine, start_relay: StartRelay, left: Left
) -> None:
    broken = threading.Event()
    broken.set()
    broker = RecordingPublisher(refuse=lambda message: "no" if broken.is_set() else None)
    publish(engine, *numbered(5, key="k"))
    start_relay(broker, max_attempts=None)
    wait_until(lambda: len(broker.refused) > 2)
    pause(engine, destination=OWN, by="anna")
    wait_until(lambda: states(engine) == ["drained"])
    refused = len(broker.refused)
    broken.clear()
    publish(engine, Outgoing(OTHER, "1"))
    broker.wait_for(1)
    assert (len(broker.refused), sent_to(broker, OWN)) == (refused, [])
    resume(engine, destination=OWN)
    wait_until(lambda: left() == [])
    assert sent_to(broker, OWN) == [str(number) for number in range(5)]


def test_a_paused_backlog_keeps_no_relay_busy(
    engine: Engine, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed: list[int] = []
    tries: list[float] = []
    send, take = Sender.send, PendingLanes.take

    def counted_send(sender: Sender, claim: Claim) -> ClaimResult:
        claimed.append(claim.destination)
        return send(sender, claim)

    def counted_take(pending: PendingLanes, now: float, **options: Any) -> Claim | None:
        tries.append(now)
        return take(pending, now, **options)

    monkeypatch.setattr(Sender, "send", counted_send)
    monkeypatch.setattr(PendingLanes, "take", counted_take)
    pause(engine, destination=OWN, by="anna")
    publish(engine, *numbered(200))
    broker = RecordingPublisher()
    start_relay(broker)
    wait_until(lambda: states(engine) == ["drained"])
    publish(engine, Outgoing(OTHER, "1"))
    broker.wait_for(1)
    wait_until(lambda: tries and time.monotonic() - tries[-1] > 0.3, "all senders sleep")
    assert set(claimed) == {number_of(OTHER)}


def test_a_destination_is_known_by_what_relays_have_sent(engine: Engine, start_relay: StartRelay) -> None:
    broker = RecordingPublisher()
    start_relay(broker)
    publish(engine, *numbered(3))
    broker.wait_for(3)
    (relay,) = wait_until(lambda: [one for one in read_outbox_status(engine).relays if one.destinations])
    assert relay.destinations == {OWN: 3}
    assert relay.version
    publish(engine, Outgoing("own:waits", "1", delay=3600))
    with engine.connect() as connection:
        for name in (OWN, "own:waits"):
            assert find_named(connection, name) == ["destination"]
        assert find_named(connection, OTHER) == []
