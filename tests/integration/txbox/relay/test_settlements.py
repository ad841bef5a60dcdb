"""Settlements of async publishers' messages: tried again as long as their claims stand, and each counts once."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url

from integration.txbox.conftest import Left, StartRelay
from integration.txbox.relay.conftest import StartBoth, allow_settlements, refuse_settlements
from support.postgres.statements import run
from support.postgres.tcp_proxy import TcpProxy
from support.txbox.outbox import OWN, letters, numbered, publish
from support.txbox.publishers import AsyncRecorder, RecordingPublisher, wait_for_freedom
from support.waiting import wait_until
from txbox import DeadLetters, Outbox, Outgoing
from txbox.instrumentation import DatabaseLost, Event
from txbox.relay import OutboxMessage, Relay, async_sender, async_settler, dispatcher
from txbox.relay.async_sender import AsyncSender


class Growing:
    """Pauses of which the third is longer than any stop."""

    def seconds(self, attempt: int) -> float:
        return 0.05 if attempt < 3 else 600.0


AWAITED = pytest.mark.parametrize("start_relay", ["async"], indirect=True)


@pytest.fixture
def proxied(schema_url: str, proxy: TcpProxy) -> Iterator[Engine]:
    """Connections that can be lost, for settlements alone."""
    engine = create_engine(make_url(schema_url).set(host="127.0.0.1", port=proxy.port), pool_size=1, max_overflow=0)
    yield engine
    wait_until(lambda: engine.pool.checkedout() == 0, "it is given back")  # type: ignore[attr-defined] # a QueuePool's
    engine.dispose()


def settling_by(engine: Engine, relay: Relay) -> AsyncSender:
    """Have a relay, which has sent nothing yet, settle by an engine of its own."""
    sender = relay._async_sender
    assert sender is not None
    sender._settler._engine = engine
    return sender


@AWAITED
def test_a_refusal_whose_settlement_is_tried_again_counts_once(
    engine: Engine, start_relay: StartRelay, proxy: TcpProxy, proxied: Engine
) -> None:
    broker = RecordingPublisher(lambda _: "no")
    settling_by(proxied, start_relay(broker, max_attempts=3))
    proxy.lose_next(reaches_server=True)
    publish(engine, *numbered(1, key="a"))
    wait_until(lambda: letters(engine), "it is parked")
    assert proxy.lost == 1
    assert [message.attempts for message in broker.refused] == [0, 1, 2]
    assert letters(engine) == [(f"txbox:outbox:{OWN}", "no", 3)]


@AWAITED
def test_a_letter_that_was_redriven_is_not_parked_again_by_a_settlement_that_is_tried_again(
    engine: Engine, start_relay: StartRelay, proxy: TcpProxy, proxied: Engine
) -> None:
    """It is redriven in the time until the settlement, whose answer was lost, is tried again."""

    def redrive(event: Event) -> None:
        if isinstance(event, DatabaseLost) and not redriven:
            redriven.append(DeadLetters(engine).republish(1, Outbox()))

    redriven: list[object] = []
    broker = RecordingPublisher(lambda _: None if redriven else "no")
    settling_by(proxied, start_relay(broker, max_attempts=1, hooks=[redrive]))
    proxy.lose_next(reaches_server=True)
    publish(engine, Outgoing(OWN, "one", key="a"))
    broker.wait_for(1)
    with engine.connect() as connection:
        parked = connection.exec_driver_sql("SELECT count(*), count(redriven_at) FROM dead_letter").one()
    assert tuple(parked) == (1, 1)


@AWAITED
@pytest.mark.parametrize("fails", ["all", "this one"])
def test_a_stop_tries_to_settle_what_was_sent_until_its_time_is_over(
    engine: Engine,
    start_relay: StartRelay,
    proxy: TcpProxy,
    proxied: Engine,
    left: Left,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
) -> None:
    """Nothing can be settled, or one settlement is refused; half a second after the stop has begun, all is well."""
    monkeypatch.setattr(async_settler, "OUTAGE_BACKOFF", Growing())
    heard: list[Event] = []
    broker = RecordingPublisher(before=lambda _: lose_settlements(proxy))
    relay = start_relay(broker, hooks=[heard.append])
    if fails == "all":
        settling_by(proxied, relay)
    else:
        refuse_settlements(engine)
    publish(engine, *numbered(1))
    wait_until(lambda: sum(isinstance(event, DatabaseLost) for event in heard) >= 3, "its pause is long")
    mended = threading.Timer(0.5, proxy.accept if fails == "all" else lambda: allow_settlements(engine))
    mended.start()
    assert relay.stop(10)
    mended.join()
    assert left() == []
    assert broker.bodies == ["0"]


def test_what_ignores_its_cancellation_keeps_nothing_from_being_tried_after_refused_settlements(
    engine: Engine, start_both: StartBoth, freed: threading.Event, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "CANCEL_SECONDS", 0.1)

    async def send(messages: Sequence[OutboxMessage]) -> None:
        while messages[0].destination == "far:deaf" and not freed.is_set():
            with suppress(asyncio.CancelledError):
                await wait_for_freedom(freed)

    refuse_settlements(engine)
    others = [f"far:{number}" for number in range(async_settler.MOST_REFUSED + 1)]
    publish(engine, *[Outgoing(destination, destination) for destination in ["far:deaf", *others]])
    sender = start_both(AsyncRecorder(send), publish_timeout_seconds=1)._async_sender
    assert sender is not None
    wait_until(
        lambda: sender._deliveries and all(one.lost for one in tuple(sender._deliveries)) and not sender._settler.works,
        "all but the one that goes on is given up",
    )
    allow_settlements(engine)
    wait_until(lambda: left() == ["far:deaf"], "the others are tried again", timeout=30)


def test_a_call_under_way_keeps_no_change_of_the_table_waiting(
    engine: Engine, start_both: StartBoth, freed: threading.Event, left: Left
) -> None:
    async def wait(messages: Sequence[OutboxMessage]) -> None:
        if messages[0].destination == "far:refused" and messages[0].attempts == 0:
            raise ValueError("later")
        waiting.add(messages[0].destination)
        await wait_for_freedom(freed)

    waiting: set[str] = set()
    far = AsyncRecorder(wait)
    publish(engine, Outgoing("far:new", "1", key="a"), Outgoing("far:refused", "2", key="a"))
    start_both(far)
    wait_until(
        lambda: waiting == {"far:new", "far:refused"},
        timeout=10,
        what="both are under way, one of them as it has come due",
    )
    publish(engine, Outgoing("far:refused", "3", key="b"))  # read beside a key that is held
    with engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL lock_timeout = '5s'; ALTER TABLE outbox_message ADD COLUMN extra integer")
    freed.set()
    wait_until(lambda: left() == [], "an empty outbox")
    assert sorted(far.bodies) == ["1", "2", "3"]


def test_a_reset_of_the_servers_statistics_has_nothing_sent_again(
    engine: Engine, start_both: StartBoth, freed: threading.Event, left: Left
) -> None:
    """Since then, the server looks like another one, to which a crash may have undone what was settled."""
    waiting: set[str] = set()

    async def wait(messages: Sequence[OutboxMessage]) -> None:
        waiting.add(messages[0].destination)
        await wait_for_freedom(freed)

    far, heard = AsyncRecorder(wait), list[Event]()
    publish(engine, Outgoing("far:one", "1", key="a"))
    scheduler = start_both(far, hooks=[heard.append])._scheduler
    wait_until(lambda: waiting == {"far:one"}, "it is under way")
    first = scheduler._server
    run(engine, "SELECT pg_stat_reset_shared('bgwriter')")
    publish(engine, Outgoing("far:two", "2", key="a"))
    wait_until(lambda: waiting == {"far:one", "far:two"}, "another one is under way")
    scheduler._server, second = first, scheduler._server  # as if the poller had not looked yet
    assert first != second
    publish(engine, Outgoing("far:three", "3", key="a"))
    wait_until(lambda: len(waiting) == 3, "a third one is under way")
    scheduler._server = second
    freed.set()
    wait_until(lambda: left() == [], "an empty outbox")
    assert sorted(far.bodies) == ["1", "2", "3"]
    assert not [event for event in heard if isinstance(event, DatabaseLost)]


# --- the connection for settlements ----------------------------------------------------------------------------------


def lose_settlements(proxy: TcpProxy) -> None:
    proxy.refuse()
    proxy.cut()


def test_while_only_settlements_fail_nothing_is_sent_again_and_nothing_else_is_claimed(
    engine: Engine, start_both: StartBoth, freed: threading.Event, proxy: TcpProxy, proxied: Engine, left: Left
) -> None:
    far, heard = AsyncRecorder(lambda _: wait_for_freedom(freed)), list[Event]()
    relay = start_both(far, hooks=[heard.append])
    sender = settling_by(proxied, relay)
    publish(engine, *[Outgoing(f"far:{number}", str(number)) for number in range(5)])
    wait_until(lambda: len(sender._deliveries) == 5, "all are under way")
    lose_settlements(proxy)
    freed.set()
    far.wait_for(5)
    publish(engine, *numbered(1, first=5, to="far:new"))
    wait_until(lambda: sum(isinstance(event, DatabaseLost) for event in heard) >= 4, "it is tried again")
    assert far.bodies.count("5") == 0, "what could not be settled is not sent"
    proxy.accept()
    wait_until(lambda: left() == [], "an empty outbox")
    assert sorted(far.bodies) == ["0", "1", "2", "3", "4", "5"], "each was sent once"


def test_what_cannot_be_settled_is_left_to_other_relays_after_a_time(
    engine: Engine, start_both: StartBoth, freed: threading.Event, proxy: TcpProxy, proxied: Engine, left: Left
) -> None:
    far, other = AsyncRecorder(lambda _: wait_for_freedom(freed)), AsyncRecorder()
    sender = settling_by(proxied, start_both(far, publish_timeout_seconds=1))
    publish(engine, *numbered(1, to="far:somewhere", key="a"))
    wait_until(lambda: sender._deliveries, "it is under way")
    lose_settlements(proxy)
    freed.set()
    far.wait_for(1)
    start_both(other)
    other.wait_for(1)
    wait_until(lambda: left() == [], "the other one has settled it")
    assert far.bodies == ["0"], "it claims nothing that it could not settle"


def test_a_host_that_has_all_other_connections_keeps_nothing_from_being_settled_and_claimed(
    engine: Engine, start_both: StartBoth, freed: threading.Event, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_sender, "SESSION_SECONDS", 0.0)
    monkeypatch.setattr(async_settler, "IDLE_SECONDS", 0.0)
    pooled = create_engine(engine.url, pool_size=4, max_overflow=0, pool_timeout=0.05)
    far, heard = AsyncRecorder(lambda _: wait_for_freedom(freed)), list[Event]()
    relay = start_both(far, engine=pooled, listen=False, publish_timeout_seconds=1, hooks=[heard.append])
    sender = relay._async_sender
    assert sender is not None
    publish(engine, *numbered(1, to="far:one"))
    wait_until(lambda: sender._deliveries, "it is under way")
    with ExitStack() as host:
        while pooled.pool.checkedout() < 4:  # type: ignore[attr-defined] # a QueuePool's
            host.enter_context(pooled.connect())
        publish(engine, *numbered(1, first=1, to="far:two"))
        wait_until(lambda: len(sender._deliveries) == 2, "the session that is old by now claims more")
        settling: Any = sender._settler._connection
        assert not sender._settler._is_lost(settling)
        settling.connection.driver_connection.pgconn.exec_(b"DEALLOCATE ALL")  # as a rollback of psycopg's does
        assert not sender._settler._is_lost(settling), "the host would have its place in the pool"
        freed.set()
        wait_until(lambda: left() == [], "all is settled", timeout=10)
    assert sorted(far.bodies) == ["0", "1"]
    assert not [event for event in heard if isinstance(event, DatabaseLost)]
    assert relay.stop(10)
    pooled.dispose()


def test_a_connection_for_settlements_that_was_ended_while_it_was_idle_is_replaced_unnoticed(
    engine: Engine, start_both: StartBoth, freed: threading.Event, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As idle_session_timeout does."""
    monkeypatch.setattr(async_settler, "IDLE_SECONDS", 0.0)
    far, heard = AsyncRecorder(lambda _: wait_for_freedom(freed)), list[Event]()
    sender = start_both(far, hooks=[heard.append])._async_sender
    publish(engine, *numbered(1, to="far:one"))
    wait_until(lambda: sender and sender._deliveries, "it is under way")
    assert sender is not None
    assert sender._settler._connection is not None
    backend: Any = sender._settler._connection.connection.driver_connection
    run(engine, "SELECT pg_terminate_backend(%s)", (backend.info.backend_pid,))
    freed.set()
    wait_until(lambda: left() == [], "it is settled")
    assert not [event for event in heard if isinstance(event, DatabaseLost)]
