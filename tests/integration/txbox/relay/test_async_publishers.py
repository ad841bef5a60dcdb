"""Async publishers: hundreds of calls at once, and what none of them may do to another, or to the relay."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from sqlalchemy import Engine

from integration.txbox.conftest import Left
from integration.txbox.relay.conftest import StartBoth, allow_settlements, refuse_settlements
from support.txbox.outbox import numbered, publish
from support.txbox.publishers import AsyncRecorder, RecordingPublisher, wait_for_freedom
from support.waiting import wait_until
from txbox import BrokerError, Outgoing
from txbox.instrumentation import BrokerLost, DatabaseLost, Event, PublisherOverdue, Relayed
from txbox.outbox.lanes import number_of
from txbox.relay import OutboxMessage, Relay, dispatcher

FAR = "far:somewhere"

DESTINATIONS = 240


def test_hundreds_of_calls_are_under_way_at_once_and_hold_neither_a_thread_nor_a_snapshot(
    engine: Engine, start_both: StartBoth, freed: threading.Event, left: Left
) -> None:
    waiting: Counter[str] = Counter()

    async def wait(messages: Sequence[OutboxMessage]) -> None:
        waiting[messages[0].destination] += 1
        await wait_for_freedom(freed)

    far, own = AsyncRecorder(wait), RecordingPublisher()
    publish(
        engine, *[Outgoing(f"far:{number % DESTINATIONS}", str(number), key="k") for number in range(2 * DESTINATIONS)]
    )
    start_both(far, own)
    wait_until(lambda: len(waiting) == DESTINATIONS, "each destination has its call under way")
    publish(engine, *numbered(5))
    wait_until(lambda: len(left()) == 2 * DESTINATIONS, "the others are settled")
    assert own.bodies == ["0", "1", "2", "3", "4"]
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("txbox-relay-")]) <= 3 + 9
    with engine.connect() as connection:
        holding = "SELECT count(*), count(backend_xmin), count(backend_xid) FROM pg_stat_activity WHERE pid IN ({})"
        locking = "SELECT pid FROM pg_locks WHERE locktype = 'advisory'"
        assert connection.exec_driver_sql(holding.format(locking)).one() == (1, 0, 0)
    assert max(waiting.values()) == 1, "one call at a time of one key"
    freed.set()
    far.wait_for(2 * DESTINATIONS)
    wait_until(lambda: left() == [], "an empty outbox")
    assert all(
        [int(message.body) for message in far.received if message.destination == f"far:{number}"]
        == [number, number + DESTINATIONS]
        for number in range(DESTINATIONS)
    )


def test_a_call_that_never_ends_is_cancelled_and_sent_again_and_delays_no_other(
    engine: Engine, start_both: StartBoth, freed: threading.Event, left: Left
) -> None:
    async def wait(messages: Sequence[OutboxMessage]) -> None:
        if messages[0].destination == "far:hangs":
            await wait_for_freedom(freed)

    far, heard = AsyncRecorder(wait), list[Event]()
    publish(engine, Outgoing("far:hangs", "hangs"))
    start_both(far, publish_timeout_seconds=2, hooks=[heard.append], max_attempts=1)
    for number in range(20):
        publish(engine, *numbered(10, to=f"far:{number % 3}"))
        far.wait_for(10 * (number + 1))
        wait_until(lambda: left() == ["hangs"], "the others are settled while it hangs")
    wait_until(lambda: far.cancelled, "its time has passed")
    wait_until(lambda: any(isinstance(event, BrokerLost) for event in heard))
    [lost, *_] = [event for event in heard if isinstance(event, BrokerLost)]
    assert (lost.source, str(lost.error)) == ("far:hangs", "its publisher has not returned for 2 s")
    freed.set()
    far.wait_for(201)
    assert [message.attempts for message in far.received if message.body == b"hangs"] == [0], "it is not to blame"


def test_a_coroutine_that_takes_no_notice_of_its_end_leaves_its_messages_to_another_relay(
    engine: Engine, start_both: StartBoth, freed: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "CANCEL_SECONDS", 0.1)

    async def wait(messages: Sequence[OutboxMessage]) -> None:
        while messages[0].destination == "far:hangs" and not freed.is_set():
            try:
                await wait_for_freedom(freed)
            except asyncio.CancelledError:
                continue

    deaf, other = AsyncRecorder(wait), AsyncRecorder()
    own = RecordingPublisher(before=lambda _: freed.wait(30))  # keeps the only thread from reading what is not its own
    publish(engine, *numbered(1))
    first = start_both(deaf, own, publish_timeout_seconds=1, senders=1, max_senders=1)
    wait_until(lambda: first._dispatcher.overdue_calls(), "the thread's time has passed")
    publish(engine, Outgoing("far:hangs", "1", key="a"), Outgoing("far:hangs", "2", key="a"))
    wait_until(lambda: len(first._dispatcher.overdue_calls()) == 2, "its time has passed")
    publish(engine, *numbered(5, to="far:quick"))
    deaf.wait_for(5)
    start_both(other)
    other.wait_for(2)
    assert other.bodies == ["1", "2"]
    freed.set()
    sender = first._async_sender
    wait_until(lambda: sender and not sender._deliveries, "it has ended at last")
    assert first._scheduler._is_async(number_of("far:hangs")), "no thread is to find out whose it is"
    publish(engine, Outgoing("far:hangs", "3", key="a"))
    wait_until(lambda: "3" in [*deaf.bodies, *other.bodies], "the next one")
    assert "2" not in [message.body.decode() for message in deaf.received if message.key]


def test_a_call_that_blocks_the_loop_blocks_no_other_publisher_and_loses_no_claim(
    engine: Engine, start_both: StartBoth, freed: threading.Event, left: Left
) -> None:
    async def wait(_: object) -> None:
        freed.wait(30)

    far, own, heard = AsyncRecorder(wait), RecordingPublisher(), list[Event]()
    publish(engine, *numbered(3, to=FAR, key="a"))
    relay = start_both(far, own, publish_timeout_seconds=1, hooks=[heard.append])
    wait_until(lambda: any(isinstance(event, PublisherOverdue) for event in heard), "it is told of")
    publish(engine, *numbered(20))
    own.wait_for(20)
    assert relay.running
    since = time.monotonic()
    wait_until(lambda: time.monotonic() > since + 1.5, "a session that is silent for so long is ended by the server")
    with engine.connect() as connection:
        locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        assert connection.exec_driver_sql(locks).scalar_one() >= 1, "its claim stands"
    freed.set()
    wait_until(lambda: left() == [], "an empty outbox")
    assert far.bodies == ["0", "1", "2"]
    assert not [event for event in heard if isinstance(event, DatabaseLost)], "no session has ended for its silence"


def test_no_call_is_begun_while_it_is_not_known_whether_its_claim_stands(
    engine: Engine, start_both: StartBoth, freed: threading.Event, left: Left
) -> None:
    """The thread that asks for it hangs in a hook, longer than the server waits for it."""

    async def wait(messages: Sequence[OutboxMessage]) -> None:
        if messages[0].destination == "far:busy":
            begun.append(messages[0].body)
            await asyncio.sleep(0.7)

    def hang(event: Event) -> None:
        if isinstance(event, Relayed) and event.source == "far:quick":
            freed.wait(30)

    begun: list[bytes] = []
    far, other = AsyncRecorder(wait), AsyncRecorder()
    start_both(far, publish_timeout_seconds=1, hooks=[hang])
    publish(engine, *numbered(1, to="far:busy", key="a"))
    wait_until(lambda: left() == [], "it is no new destination any more")
    publish(engine, *numbered(2, first=1, to="far:busy", key="a"), *numbered(1, to="far:quick"))
    far.wait_for(3)
    start_both(other, publish_timeout_seconds=1)
    other.wait_for(2)
    assert (begun, other.bodies) == ([b"0", b"1"], ["1", "2"])
    freed.set()
    publish(engine, *numbered(1, first=3, to="far:busy", key="a"))
    wait_until(lambda: "3" in [*far.bodies, *other.bodies], "the next one")
    assert b"2" not in begun


def test_a_stop_cancels_what_has_not_ended_in_time_and_settles_only_what_was_confirmed(
    engine: Engine, freed: threading.Event, left: Left
) -> None:
    async def wait(messages: Sequence[OutboxMessage]) -> None:
        if messages[0].body == b"1":
            hangs.set()
            await wait_for_freedom(freed)

    hangs, far = threading.Event(), AsyncRecorder(wait)
    publish(engine, *numbered(3, to=FAR, key="a"))
    relay = Relay(engine, {"far": far})
    relay.start()
    assert hangs.wait(30)
    assert not relay.stop(0.2), "it was not finished"
    assert (far.cancelled, far.bodies) == (1, ["0"])
    wait_until(lambda: left() == ["1", "2"], "what was confirmed before is gone, the rest is there")
    wait_until(lambda: far.lives == ["entered", "left"], "its client can be closed")
    wait_until(lambda: not relay.running, "no thread of it is left")
    freed.set()
    relay.start()
    far.wait_for(3)
    assert relay.stop(20)
    assert far.bodies == ["0", "1", "2"]
    assert far.lives == ["entered", "left"] * 2


def test_a_stop_cancels_what_the_loop_has_not_begun_yet(
    engine: Engine, freed: threading.Event, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox.relay.relay.CANCEL_SECONDS", 0.1)

    async def wait(messages: Sequence[OutboxMessage]) -> None:
        if messages[0].destination == "far:blocks":
            blocks.set()
            freed.wait(30)

    blocks, far = threading.Event(), AsyncRecorder(wait)
    publish(engine, Outgoing("far:blocks", "1"))
    relay = Relay(engine, {"far": far})
    relay.start()
    assert blocks.wait(30)
    publish(engine, Outgoing("far:next", "2"))
    sender = relay._async_sender
    wait_until(lambda: sender and len(sender._deliveries) == 2, "a delivery waits for the loop")
    assert not relay.stop(0.2), "it was not finished"
    freed.set()
    wait_until(lambda: not relay.running, "no thread of it is left")
    assert left() == ["1", "2"], "none of them was confirmed"


def test_a_stop_waits_for_what_ends_in_time(engine: Engine, freed: threading.Event, left: Left) -> None:
    begun = threading.Event()

    async def wait(_: object) -> None:
        begun.set()
        await wait_for_freedom(freed)

    far = AsyncRecorder(wait)
    publish(engine, *numbered(2, to=FAR, key="a"))
    relay = Relay(engine, {"far": far})
    relay.start()
    assert begun.wait(30)
    stopper = threading.Thread(target=lambda: stopped.append(relay.stop(20)))
    stopped: list[bool] = []
    stopper.start()
    wait_until(lambda: relay.stopping)
    freed.set()
    stopper.join(30)
    assert stopped == [True]
    assert (far.bodies, far.cancelled, left()) == (["0"], 0, ["1"])


def test_a_settlement_that_fails_holds_up_no_other(engine: Engine, start_both: StartBoth, left: Left) -> None:
    refuse_settlements(engine, "OLD.destination = 'far:bad'")

    async def wait(messages: Sequence[OutboxMessage]) -> None:
        arrived.add(messages[0].destination)
        while len(arrived) < 4:
            await asyncio.sleep(0.01)

    arrived: set[str] = set()
    far, heard = AsyncRecorder(wait), list[Event]()
    publish(engine, *[Outgoing(f"far:{where}", where) for where in ("bad", "a", "b", "c")])
    start_both(far, hooks=[heard.append])
    wait_until(lambda: left() == ["bad"], "the others are settled")
    assert sorted(body for body in far.bodies if body != "bad") == ["a", "b", "c"], "and not sent again"
    wait_until(lambda: sum("not this one" in str(lost.error) for lost in heard if isinstance(lost, DatabaseLost)) > 2)
    publish(engine, *numbered(1, to="far:a"))
    wait_until(lambda: left() == ["bad"], "it is tried again, and holds up nothing")
    allow_settlements(engine)
    wait_until(lambda: left() == [], "it can be settled")
    assert far.bodies.count("bad") == 1, "and was not sent again"


def test_what_an_earlier_server_has_answered_is_not_settled_beside_what_this_one_has(
    engine: Engine, start_both: StartBoth, freed: threading.Event
) -> None:
    publish(engine, *numbered(1, to=FAR))
    sender = start_both(AsyncRecorder(lambda _: wait_for_freedom(freed)))._async_sender
    assert sender is not None
    [delivery] = wait_until(lambda: list(sender._deliveries))
    earlier = replace(delivery, claim=replace(delivery.claim, server="an earlier one"))
    sender._settler._commit([delivery])
    with pytest.raises(BrokerError, match="restarted or replaced"):
        sender._settler._commit([delivery, earlier])
