"""How many messages a publisher is given at a time, learned from how long it takes."""

import pytest

from txbox.relay import batch_size as module
from txbox.relay.batch_size import FIRST_SIZE, MOST_SIZE, Pace


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def call(pace: Pace, clock: Clock, count: int, seconds: float) -> int:
    with pace.of(count):
        clock.now += seconds
    return pace.size


def test_it_begins_carefully_and_grows_with_what_is_quick(clock: Clock) -> None:
    pace = Pace(15.0)
    assert pace.size == FIRST_SIZE
    assert call(pace, clock, 50, 0.01) == 200
    assert call(pace, clock, 200, 0.01) == 800


def test_a_slow_publisher_is_given_what_it_can_do_in_time(clock: Clock) -> None:
    pace = Pace(15.0)
    assert call(pace, clock, 50, 100.0) == 7
    assert call(pace, clock, 7, 14.0) == 7
    assert call(pace, clock, 1, 60.0) == 1, "never less than one"


def test_one_that_has_recovered_is_given_more_again(clock: Clock) -> None:
    pace = Pace(15.0)
    call(pace, clock, 1, 60.0)
    sizes = [call(pace, clock, pace.size, 0.001) for _ in range(4)]
    assert sizes == [4, 16, 64, 256]


def test_a_quick_call_of_a_few_says_little_of_many(clock: Clock) -> None:
    pace = Pace(15.0)
    assert call(pace, clock, 2, 0.0) == FIRST_SIZE
    assert call(pace, clock, 2, 0.01) == FIRST_SIZE


def test_there_is_an_end_to_growth(clock: Clock) -> None:
    pace = Pace(15.0)
    for _ in range(20):
        call(pace, clock, pace.size, 0.0)
    assert pace.size == MOST_SIZE


def test_a_call_that_fails_is_a_lesson_too(clock: Clock) -> None:
    pace = Pace(15.0)

    def fail() -> None:
        with pace.of(50):
            clock.now += 150.0
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        fail()
    assert pace.size == 5
