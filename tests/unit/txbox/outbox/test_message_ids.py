"""Ids of messages: UUIDs of version 7 that grow."""

import os
import threading
import time
import uuid

import pytest

from txbox.messages.message import valid_message_id
from txbox.outbox import message_ids
from txbox.outbox.message_ids import new_message_id


def test_an_id_is_a_uuid_of_version_7_with_the_time_in_front() -> None:
    before = time.time_ns() // 1_000_000
    made = uuid.UUID(new_message_id())
    after = time.time_ns() // 1_000_000
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert before <= made.int >> 80 <= after
    assert valid_message_id(str(made)) == str(made)


def test_ids_grow_and_no_two_are_the_same() -> None:
    made = [new_message_id() for _ in range(20_000)]
    assert made == sorted(set(made))


def test_threads_share_no_id() -> None:
    made: list[str] = []

    def make() -> None:
        made.extend([new_message_id() for _ in range(5_000)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 20_000


@pytest.mark.parametrize("change", [0, -3_600_000_000_000])
def test_ids_grow_while_the_clock_stands_still_or_goes_back(monkeypatch: pytest.MonkeyPatch, change: int) -> None:
    first = new_message_id()
    now = time.time_ns() + change
    monkeypatch.setattr(message_ids.time, "time_ns", lambda: now)
    made = [first, *(new_message_id() for _ in range(1_000))]
    assert made == sorted(set(made))


def test_a_counter_that_runs_over_borrows_the_next_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = message_ids._Generator()
    monkeypatch.setattr(message_ids.time, "time_ns", lambda: 1_000_000_000)
    first = generator.next()
    generator._counter = (1 << 42) - 2
    made = [generator.next() for _ in range(3)]
    assert [one.int >> 80 for one in made] == [1000, 1001, 1001]
    assert [first, *made] == sorted({first, *made})


def test_a_forked_child_makes_ids_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns() + 10**10
    monkeypatch.setattr(message_ids.time, "time_ns", lambda: now)
    new_message_id()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, new_message_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    theirs = os.read(reading, 100).decode()
    os.close(reading)
    assert uuid.UUID(theirs).int >> 32 != uuid.UUID(new_message_id()).int >> 32
