"""The prefetch buffer: what a batch takes, in which order, and how much is held."""

import threading
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest

from support.waiting import wait_until
from txbox import Message
from txbox_workers.delivery import Delivery
from txbox_workers.polling import prefetch_buffer
from txbox_workers.polling.prefetch_buffer import PrefetchBuffer, Waiting


def deliveries(text: str, size: int = 0) -> list[Delivery]:
    """Deliveries named as in "a1 b1 -1": the letter is the group, - for none."""
    return [
        Delivery(Message(name, b""), receipt=name, group=None if name[0] == "-" else name[0], body=b"x" * size)
        for name in text.split()
    ]


def named(waiting: Sequence[Waiting]) -> str:
    return " ".join(one.delivery.receipt for one in waiting)


class Clock:
    """A monotonic clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(prefetch_buffer, "time", clock)
    return clock


class Made:
    """A buffer, and what it looks at."""

    def __init__(self, **options: Any) -> None:
        self.stopping, self.closed = threading.Event(), threading.Event()
        settings: dict[str, Any] = {
            "prefetch": 1000,
            "least": 20,
            "batch_size": 10,
            "gather_seconds": 0.0,
            "visibility_seconds": None,
            **options,
        }
        self.buffer = PrefetchBuffer(
            group=lambda delivery: delivery.group, closed=self.closed.is_set, stopping=self.stopping, **settings
        )

    def put(self, text: str, size: int = 0) -> bool:
        return self.buffer.put(deliveries(text, size), 0)

    def take(self) -> list[Waiting]:
        return self.buffer.take()

    def room(self) -> int:
        """How many may still be held; they are, afterwards."""
        count = 0
        while self.buffer._has_room(1):
            assert self.buffer.reserve(1)
            count += 1
        return count


@pytest.fixture
def made() -> Made:
    return Made()


def test_a_batch_takes_what_there_is_up_to_its_size_in_order(made: Made) -> None:
    made.put("-1 -2 -3 -4 -5 -6")
    made.put("-7 -8 -9 -a -b -c")
    assert named(made.take()) == "-1 -2 -3 -4 -5 -6 -7 -8 -9 -a"
    assert named(made.take()) == "-b -c"


def test_a_group_is_in_one_batch_at_a_time() -> None:
    made = Made(batch_size=3)
    made.put("a1 a2 b1 a3 a4 b2 -1")
    first = made.take()
    assert named(first) == "a1 a2 b1"
    assert named(made.take()) == "-1"
    made.put("a5 -2")
    assert named(made.take()) == "-2"
    assert made.buffer.end(first, ()) == []
    assert sorted(named(made.take()).split()) == ["a3", "a4", "a5"]


def test_what_waits_behind_a_group_comes_before_what_came_later() -> None:
    made = Made(batch_size=1)
    made.put("a1 a2")
    order = []
    for number in range(3, 8):
        batch = made.take()
        order.append(named(batch))
        made.put(f"a{number}")
        made.buffer.end(batch, ())
    assert order == ["a1", "a2", "a3", "a4", "a5"]


def test_what_follows_a_failure_in_its_group_is_handed_back_in_order_and_nothing_else() -> None:
    made = Made(batch_size=2)
    made.put("a1 b1 a2 b2 -1 a3")
    first = made.take()
    assert named(made.take()) == "-1"
    made.put("a4 b3 -2")
    assert named(made.buffer.end(first, {"a"})) == "a2 a3 a4"
    assert named(made.take()) == "b2 b3"
    assert named(made.take()) == "-2"


def test_after_that_the_group_is_free_for_what_the_broker_delivers_again(made: Made) -> None:
    made.put("a1")
    made.buffer.end(made.take(), {"a"})
    made.put("a1 a2")
    assert named(made.take()) == "a1 a2"


def test_fewer_than_a_batch_wait_for_others_so_long_and_no_longer(clock: Clock) -> None:
    made = Made(batch_size=3, gather_seconds=5.0)
    made.put("-1 -2")
    taken: list[str] = []
    taking = threading.Thread(target=lambda: taken.append(named(made.take())))
    taking.start()
    taking.join(0.2)
    assert taken == []
    made.put("-3")
    taking.join(20)
    assert taken == ["-1 -2 -3"]
    made.put("-4")
    clock.now += 5.0
    assert named(made.take()) == "-4"


def test_who_may_not_wait_gets_what_another_would_get_at_once_or_nothing(clock: Clock) -> None:
    made = Made(gather_seconds=5.0, batch_size=3)
    assert made.buffer.take_now() == []
    made.put("a1 -1")
    assert made.buffer.take_now() == [], "others may come"
    made.put("a2 -2")
    assert named(made.buffer.take_now()) == "a1 -1 a2"
    made.put("a3")
    clock.now += 6
    assert named(made.buffer.take_now()) == "-2", "its group is busy"
    made.put("-3 -4 -5")
    made.closed.set()
    assert made.buffer.take_now() == []
    made.closed.clear()
    made.stopping.set()
    assert made.buffer.take_now() == []
    assert named(made.buffer.empty()) == "-3 -4 -5 a3"


def test_so_many_are_held_at_most_until_they_are_settled() -> None:
    made = Made(prefetch=25)
    assert made.room() == 25
    made.buffer.release(7)
    assert made.room() == 7


def test_no_more_is_received_while_too_many_bytes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_buffer, "WAITING_BYTES", 100)
    made = Made()
    made.put("-1 -2", size=50)
    assert made.room() == 0
    made.put("-1 -2", size=50)
    made.take()
    assert made.room() == 1000


def test_held_are_so_many_as_are_settled_in_a_quarter_of_the_visibility(clock: Clock) -> None:
    made = Made(prefetch=300, visibility_seconds=8.0)
    assert made.room() == 20, "nothing is known of its speed yet"
    clock.now += 1.0
    made.buffer.release(20)
    assert made.room() == 40, "20 a second, for 2 seconds"
    clock.now += 10.0
    made.buffer.release(40)
    assert made.room() == 20, "4 a second"
    clock.now += 0.5
    made.buffer.release(20)
    clock.now += 0.5
    made.buffer.release(0)
    assert made.room() == 20
    for _ in range(4):
        clock.now += 0.5
        made.buffer.release(made.buffer._held)
        made.room()
    assert made.buffer._held == 300, "the limit"


def test_a_closed_buffer_takes_nothing_and_gives_nothing(made: Made) -> None:
    made.put("-1 a1 a2")
    batch = made.take()
    made.put("a3 -2")
    made.closed.set()
    assert not made.put("-3")
    assert sorted(named(made.buffer.empty()).split()) == ["-2", "a3"]
    made.closed.clear()
    assert made.buffer.end(batch, ()) == []
    made.put("-4 a4")
    assert named(made.take()) == "-4 a4"


def test_a_stop_ends_all_waits() -> None:
    made = Made(prefetch=20)
    assert made.buffer.reserve(20)
    answers: list[object] = []
    waits = [
        threading.Thread(target=lambda: answers.append(made.buffer.reserve(10))),
        threading.Thread(target=lambda: answers.append(made.buffer.take())),
    ]
    for wait in waits:
        wait.start()
    made.stopping.set()
    made.buffer.empty()
    for wait in waits:
        wait.join(20)
    assert sorted(map(str, answers)) == ["False", "[]"]


@pytest.mark.parametrize("gather_seconds", [0.0, 0.001])
def test_no_thread_is_left_waiting_for_what_is_there(gather_seconds: float) -> None:
    """Many receive and many process, and it is closed now and then: all that was put is taken, once."""
    made = Made(prefetch=60, least=10, batch_size=7, gather_seconds=gather_seconds)
    total, numbers, lock = 4_000, iter(range(4_000)), threading.Lock()
    taken: list[str] = []
    done = threading.Event()

    def receive() -> None:
        while made.buffer.reserve(10):
            with lock:
                several = list(islice(numbers, 1 + len(taken) % 10))
            names = " ".join(f"{'ab---'[number % 5]}{number}" for number in several)
            made.buffer.release(10 - len(several), settled=False)
            while several and not made.put(names):
                threading.Event().wait(0.001)
            if not several:
                return

    def process() -> None:
        while batch := made.take():
            made.buffer.end(batch, ())
            made.buffer.release(len(batch))
            with lock:
                taken.extend(named(batch).split())
            if len(taken) == total:
                done.set()

    threads = [threading.Thread(target=work) for work in [receive] * 8 + [process] * 4]
    for thread in threads:
        thread.start()
    for _ in range(5):
        done.wait(0.02)
        made.closed.set()
        done.wait(0.002)
        made.closed.clear()
    assert done.wait(60), f"{len(taken)} of {total} were taken"
    made.stopping.set()
    made.buffer.empty()
    for thread in threads:
        thread.join(20)
    assert sorted(taken) == sorted(set(taken))
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("receiving", [True, False])
def test_what_is_enough_for_several_threads_wakes_several(receiving: bool) -> None:
    made = Made(prefetch=20, batch_size=2)
    assert made.buffer.reserve(20)
    woken: list[str] = []
    work: Any = (lambda: str(made.buffer.reserve(10))) if receiving else (lambda: named(made.take()))
    waits = [threading.Thread(target=lambda: woken.append(work())) for _ in range(2)]
    for wait in waits:
        wait.start()
    changed: Any = made.buffer._room if receiving else made.buffer._arrivals
    wait_until(lambda: len(changed._waiters) == 2)
    if receiving:
        made.buffer.release(20)
    else:
        made.put("-1 -2 -3 -4")
    for wait in waits:
        wait.join(20)
    assert sorted(woken) == (["True", "True"] if receiving else ["-1 -2", "-3 -4"])


def test_a_thread_that_receives_is_woken_once_there_is_room_for_what_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(prefetch=20)
    assert made.buffer.reserve(20)
    room: Any = made.buffer._room
    receiving = threading.Thread(target=made.buffer.reserve, args=(10,), daemon=True)
    receiving.start()
    wait_until(lambda: len(room._waiters) == 1)
    wakes: list[None] = []
    notify = room.notify
    monkeypatch.setattr(room, "notify", lambda: (wakes.append(None), notify()))
    for _ in range(9):
        made.buffer.release(1)
    assert wakes == []
    made.buffer.release(1)
    receiving.join(20)
    assert not receiving.is_alive()
    assert wakes


def test_a_group_that_is_free_again_wakes_who_waits() -> None:
    made = Made()
    made.put("a1")
    first = made.take()
    made.put("a2")
    taken: list[str] = []
    taking = threading.Thread(target=lambda: taken.append(named(made.take())))
    taking.start()
    wait_until(lambda: len(made.buffer._arrivals._waiters) == 1 and not made.buffer._ready)  # type: ignore[attr-defined]
    made.buffer.end(first, ())
    taking.join(20)
    assert taken == ["a2"]
