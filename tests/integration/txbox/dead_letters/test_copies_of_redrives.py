"""The copy that a redrive sends meets the redrive, which has not committed yet: it is the first, and never "parked".

The row that says a message is parked lies in the current generation of the inbox, or in an older one, of which a
recording statement has a snapshot.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from support.waiting import wait_until
from txbox import DeadLetter, DeadLetters, Inbox, InFlight, Mismatch, Reason
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox.messages.message import Message

LETTER = DeadLetter("billing", "m1", Reason.FAILED, "no", 3, "queue", b"{}")
LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


class Died(Exception):
    pass


def _one(inbox: Inbox, connection: Connection) -> bool:
    return inbox.record(connection, "m1", b"{}")


def _many(inbox: Inbox, connection: Connection) -> bool:
    return "m1" in inbox.record_many(connection, {"m0": b"0", "m1": b"{}", "m2": b"2"})


WAYS: tuple[Callable[[Inbox, Connection], bool], ...] = (_one, _many)


@pytest.fixture
def letters(engine: Engine) -> DeadLetters:
    return DeadLetters(engine)


@pytest.fixture(params=["current", "older"])
def number(request: pytest.FixtureRequest, engine: Engine, letters: DeadLetters) -> int:
    """The number of a letter whose row in the inbox is in this generation."""
    assert InboxConversion(engine).forward()
    with engine.begin() as connection:
        Inbox("billing").record(connection, "m0")
    number = letters.park(LETTER)
    assert number is not None
    if request.param == "older":
        assert Generations(engine).rotate()
    return number


def waits(engine: Engine) -> bool:
    """Whether a session of this database waits for a lock."""
    with engine.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return bool(found.scalar_one())


def require_waiting(engine: Engine, result: Future[Any]) -> None:
    """See that what is to give a result waits for a lock: a copy that is acked now is lost."""
    wait_until(lambda: waits(engine) or result.done())
    assert not result.done()


class Copy:
    """What a consumer does with the copy, on a connection of its own, again until it is told no more to."""

    def __init__(self, engine: Engine, level: str, way: Callable[[Inbox, Connection], bool], inbox: Inbox) -> None:
        self._engine, self._way, self._inbox = engine.execution_options(isolation_level=level), way, inbox
        self.has_snapshot, self.may_record = threading.Event(), threading.Event()

    def process(self) -> bool:
        """Return whether it was the first, once its transaction has committed."""
        while True:
            with suppress(OperationalError, InFlight), self._engine.begin() as connection:
                connection.exec_driver_sql("SELECT count(*) FROM processed_message")
                self.has_snapshot.set()
                assert self.may_record.wait(30)
                return self._way(self._inbox, connection)


@pytest.mark.parametrize("ends", ["commits", "dies"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", LEVELS)
def test_it_waits_for_the_redrive(
    engine: Engine,
    letters: DeadLetters,
    number: int,
    pool: ThreadPoolExecutor,
    level: str,
    way: Callable[[Inbox, Connection], bool],
    ends: str,
) -> None:
    copy = Copy(engine, level, way, Inbox("billing", fingerprint=True, wait_seconds=30))
    copy.may_record.set()
    results: list[Future[bool]] = []

    def send(_: DeadLetter) -> None:
        results.append(pool.submit(copy.process))
        require_waiting(engine, results[0])
        if ends == "dies":
            raise Died

    with suppress(Died):
        letters.redrive(number, send)
    assert results[0].result(30) is (ends == "commits")
    assert letter_of(engine) == (None if ends == "commits" else number)
    assert (letters.get(number).redriven_at is not None) is (ends == "commits")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_snapshot_that_is_older_than_the_redrive_does_not_say_parked(
    engine: Engine,
    letters: DeadLetters,
    number: int,
    pool: ThreadPoolExecutor,
    level: str,
    way: Callable[[Inbox, Connection], bool],
) -> None:
    copy = Copy(engine, level, way, Inbox("billing", fingerprint=True))
    result = pool.submit(copy.process)
    assert copy.has_snapshot.wait(30)
    letters.redrive(number, lambda _: None)
    copy.may_record.set()
    assert result.result(30)
    assert letter_of(engine) is None


def test_it_is_in_flight_when_the_redrive_takes_too_long(engine: Engine, letters: DeadLetters, number: int) -> None:
    inbox, asked = Inbox("billing", wait_seconds=0.05), []

    def send(_: DeadLetter) -> None:
        for way in WAYS:
            with pytest.raises(InFlight), engine.begin() as connection:
                way(inbox, connection)
            asked.append(way)

    letters.redrive(number, send)
    assert len(asked) == len(WAYS)
    with engine.begin() as connection:
        assert inbox.record(connection, "m1")
        assert connection.exec_driver_sql("SHOW lock_timeout").scalar_one() == "0"


def test_another_body_under_its_id_is_a_mismatch_then(engine: Engine, letters: DeadLetters, number: int) -> None:
    inbox = Inbox("billing", fingerprint=True)
    with pytest.raises(Mismatch), engine.begin() as connection:
        inbox.record(connection, "m1", b"another")
    letters.redrive(number, lambda _: None)
    with engine.begin() as connection:
        assert inbox.record(connection, "m1", b"another")


def test_a_copy_that_is_to_be_parked_waits_too(
    engine: Engine, letters: DeadLetters, number: int, pool: ThreadPoolExecutor
) -> None:
    """It comes in another envelope, so its letter is another one."""
    again: Any = DeadLetter("billing", "m1", Reason.MALFORMED, "no", 1, "queue", b"in an envelope")
    results: list[Future[int | None]] = []

    def park() -> int | None:
        return letters.park(again, message=Message("m1", b"{}"), wait_seconds=30)

    def send(_: DeadLetter) -> None:
        results.append(pool.submit(park))
        require_waiting(engine, results[0])

    letters.redrive(number, send)
    with suppress(InFlight):  # or it is handed back, and comes again
        results[0].result(30)
    parked_as = park()
    assert parked_as not in (None, number)
    assert letter_of(engine) == parked_as


def letter_of(engine: Engine) -> int | None:
    """Return the letter that the message is parked as; None if it is processed. It has one row."""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT dead_letter_id FROM processed_message WHERE message_id = 'm1'")
        return rows.scalar_one()
