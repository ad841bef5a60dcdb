"""Async publishers in trouble: one that cannot be entered, settlements that fail, and what a relay takes meanwhile."""

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from integration.txbox.conftest import Left
from integration.txbox.relay.conftest import StartBoth, allow_settlements, refuse_settlements
from support.txbox.outbox import numbered, publish
from support.txbox.publishers import AsyncRecorder, RecordingPublisher, wait_for_freedom
from support.waiting import wait_until
from txbox import BrokerError, Outgoing
from txbox.instrumentation import BrokerLost, DatabaseLost, Event
from txbox.postgres.sqlstates import OUT_OF_MEMORY, sqlstate
from txbox.relay import OutboxMessage, async_sender

FAR = "far:somewhere"


class Reluctant(AsyncRecorder):
    """Cannot be entered before it is freed: it raises, or does not return.

    Attributes:
        tries: how often it was to be entered.
    """

    def __init__(self, freed: threading.Event, *, raises: BaseException | None) -> None:
        super().__init__()
        self._freed = freed
        self._raises = raises
        self.tries = 0

    async def __aenter__(self) -> None:
        self.tries += 1
        if self._raises is not None and not self._freed.is_set():
            raise self._raises
        await wait_for_freedom(self._freed)
        await super().__aenter__()


@pytest.mark.parametrize("raises", [ValueError("no token"), SystemExit(1), asyncio.CancelledError(), None], ids=repr)
def test_a_publisher_that_cannot_be_entered_keeps_no_other_from_sending(
    engine: Engine, start_both: StartBoth, freed: threading.Event, left: Left, raises: BaseException | None
) -> None:
    far, bad, heard = AsyncRecorder(), Reluctant(freed, raises=raises), list[Event]()
    publish(engine, *[Outgoing(f"bad:{number}", "bad") for number in range(40)])
    # New destinations may have 20 calls, and there are 40 of the other.
    start_both(far, others={"bad": bad}, hooks=[heard.append], concurrency=40, publish_timeout_seconds=1)
    wait_until(lambda: bad.tries, "it is to be entered")
    for number in range(20):
        publish(engine, *numbered(1, first=number, to=f"far:{number}"))
    far.wait_for(20, timeout=10)
    lost = wait_until(lambda: [event for event in heard if isinstance(event, BrokerLost)], "it is told of")
    assert all("publisher" in str(event.error) and "entered" in str(event.error) for event in lost)
    assert far.lives == ["entered"]
    wait_until(lambda: bad.tries > 1, "it is tried again")
    freed.set()
    wait_until(lambda: left() == [], "it is entered at last")
    assert (bad.lives, bad.refused) == (["entered"], [])


class Stubborn(AsyncRecorder):
    """Makes another error of the cancellation of its ``__aenter__``, as some clients do."""

    def __init__(self) -> None:
        super().__init__()
        self.entering = threading.Event()

    async def __aenter__(self) -> None:
        self.entering.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            raise ConnectionError("it was not connected") from None


def test_a_stop_ends_an_entry_that_makes_another_error_of_its_cancellation(start_both: StartBoth) -> None:
    far = Stubborn()
    relay = start_both(far)
    assert far.entering.wait(20)
    assert relay.stop(10)


def test_one_publisher_of_two_kinds_is_entered_once(engine: Engine, start_both: StartBoth) -> None:
    far = AsyncRecorder()
    publish(engine, *numbered(1, to=FAR), *numbered(1, to="also:here"))
    start_both(far, others={"also": far})
    far.wait_for(2)
    assert far.lives == ["entered"]


def test_nothing_is_claimed_while_there_is_no_loop(
    engine: Engine, start_both: StartBoth, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a process has no file descriptor left."""

    async def end() -> None:
        raise SystemExit(1)

    async def wait(messages: Sequence[OutboxMessage]) -> None:
        if messages[0].body == b"end" and not failed:
            monkeypatch.setattr(asyncio, "new_event_loop", fail)
            await asyncio.create_task(end())

    def fail() -> None:
        failed.append(None)
        raise OSError(24, "Too many open files")

    new_event_loop, failed, far = asyncio.new_event_loop, list[None](), AsyncRecorder(wait)
    sender = start_both(far)._async_sender
    assert sender is not None
    publish(engine, Outgoing("far:ends", "end"))
    wait_until(lambda: failed, "there is no loop")
    wait_until(lambda: not sender._sessions, "what it had is let go of")
    publish(engine, *numbered(1, to="far:new"))
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert not sender._sessions, "it claims something"
        time.sleep(0.01)
    monkeypatch.setattr(asyncio, "new_event_loop", new_event_loop)
    far.wait_for(1)
    wait_until(lambda: left() == [], "there is a loop again")


# --- settling --------------------------------------------------------------------------------------------------------


def test_a_row_that_another_session_has_locked_keeps_no_other_from_being_settled(
    engine: Engine, start_both: StartBoth, left: Left
) -> None:
    lock = engine.connect()
    far = AsyncRecorder(lambda _: asyncio.to_thread(lock_first))

    def lock_first() -> None:
        if not lock.in_transaction():
            lock.exec_driver_sql("SELECT FROM outbox_message WHERE destination = 'far:locked' FOR UPDATE")

    with lock:
        publish(engine, *numbered(1, to="far:locked"))
        relay = start_both(far)
        far.wait_for(1)
        publish(engine, *numbered(20, first=1, to="far:other"))
        wait_until(lambda: left() == ["0"], "the others are settled")
        assert not relay.stop(1), "it was not finished"
        wait_until(lambda: not relay.running, "no thread of it is left", timeout=5)
        assert sorted(far.bodies, key=int) == [str(number) for number in range(21)], "each was sent once"


def test_where_all_settlements_are_refused_few_messages_are_sent_again(
    engine: Engine, start_both: StartBoth, left: Left
) -> None:
    """An empty transaction can be committed meanwhile."""
    refuse_settlements(engine)
    far = AsyncRecorder()
    sender = start_both(far, publish_timeout_seconds=1)._async_sender
    assert sender is not None
    sender._settler._hold_seconds = 0.1
    publish(engine, *[Outgoing(f"far:{number}", str(number)) for number in range(40)])
    far.wait_for(40)
    time.sleep(1.5)  # nothing tells of what is not sent; before, each of them was sent four times
    assert len(far.bodies) < 80
    allow_settlements(engine)
    wait_until(lambda: left() == [], "it is tried again and again")


# --- what it takes ---------------------------------------------------------------------------------------------------


def test_however_long_calls_take_two_sessions_claim(
    engine: Engine, start_both: StartBoth, freed: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_sender, "SESSION_SECONDS", 0.0)
    waiting: Counter[str] = Counter()

    async def wait(messages: Sequence[OutboxMessage]) -> None:
        waiting[messages[0].destination] += 1
        await wait_for_freedom(freed)

    sender = start_both(AsyncRecorder(wait))._async_sender
    assert sender is not None
    for number in range(5):
        publish(engine, Outgoing(f"far:{number}", "x"))
        wait_until(lambda number=number: f"far:{number}" in waiting)  # type: ignore[misc]
    assert len(sender._sessions) == 2
    freed.set()
    wait_until(lambda: not sender._sessions, "they end with their claims")


def test_destinations_that_keep_all_threads_waiting_do_not_hide_new_async_ones(
    engine: Engine, start_both: StartBoth, freed: threading.Event
) -> None:
    hanging: Counter[str] = Counter()

    def hang(messages: Sequence[OutboxMessage]) -> None:
        hanging[messages[0].destination] += 1
        freed.wait(60)
        raise BrokerError("it never answered")

    far, own = AsyncRecorder(), RecordingPublisher(before=hang)
    publish(engine, *[Outgoing(f"own:{number}", "x") for number in range(40)])
    start_both(far, own, senders=2, max_senders=4)
    wait_until(lambda: len(hanging) >= 2, "they hang")
    publish(engine, *numbered(1, to=FAR))
    far.wait_for(1, timeout=5)
    freed.set()


def test_a_full_table_of_locks_is_told_of_and_the_relay_goes_on_with_fewer_claims(
    engine: Engine, start_both: StartBoth, left: Left
) -> None:
    """Each destination has its lock while its call is under way."""
    far, heard = AsyncRecorder(lambda _: asyncio.sleep(0.5)), list[Event]()
    unlock = "SELECT pg_advisory_unlock(77, number) FROM generate_series(%s::int, %s::int) AS number"
    with engine.connect() as connection:
        taken = take_all_locks(connection)
        connection.exec_driver_sql(unlock, (taken - 200, taken - 1))  # fewer than there are destinations
        connection.commit()
        publish(engine, *[Outgoing(f"far:{number}", str(number)) for number in range(300)])
        start_both(far, hooks=[heard.append])
        wait_until(lambda: left() == [], "all is sent", timeout=60)
        connection.exec_driver_sql("SELECT pg_advisory_unlock_all()")
    errors = [str(event.error) for event in heard if isinstance(event, DatabaseLost)]
    assert any("max_locks_per_transaction" in error for error in errors)
    assert len(far.bodies) < 600


def take_all_locks(connection: Connection) -> int:
    """Take session locks until the server's table of them is full; return how many."""
    lock = "SELECT pg_advisory_lock(77, number) FROM generate_series(%s::int, %s::int) AS number"
    for taken in itertools.count(0, 50):
        try:
            with connection.begin():
                connection.exec_driver_sql(lock, (taken, taken + 49))
        except OperationalError as error:
            if sqlstate(error) == OUT_OF_MEMORY:
                return taken
            raise
    raise AssertionError
