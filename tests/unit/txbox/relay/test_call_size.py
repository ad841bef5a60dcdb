"""How many messages a publisher is given at a time, learned from how long it takes."""

import pytest

from txbox.relay import dispatcher
from txbox.relay.dispatcher import FIRST_CALL_SIZE, MAX_CALL_SIZE, CallSize


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(dispatcher, "time", clock)
    return clock


def call(size: CallSize, clock: Clock, count: int, seconds: float) -> int:
    with size.measured(count):
        clock.now += seconds
    return size.value


def test_it_begins_carefully_and_grows_with_what_is_quick(clock: Clock) -> None:
    size = CallSize(15.0)
    assert size.value == FIRST_CALL_SIZE
    assert call(size, clock, 50, 0.01) == 200
    assert call(size, clock, 200, 0.01) == 800


def test_a_slow_publisher_is_given_what_it_can_do_in_time(clock: Clock) -> None:
    size = CallSize(15.0)
    assert call(size, clock, 50, 100.0) == 7
    assert call(size, clock, 7, 14.0) == 7
    assert call(size, clock, 1, 60.0) == 1, "never less than one"


def test_one_that_has_recovered_is_given_more_again(clock: Clock) -> None:
    size = CallSize(15.0)
    call(size, clock, 1, 60.0)
    sizes = [call(size, clock, size.value, 0.001) for _ in range(4)]
    assert sizes == [4, 16, 64, 256]


def test_a_quick_call_of_a_few_says_little_of_many(clock: Clock) -> None:
    size = CallSize(15.0)
    assert call(size, clock, 2, 0.0) == FIRST_CALL_SIZE
    assert call(size, clock, 2, 0.01) == FIRST_CALL_SIZE


def test_there_is_an_end_to_growth(clock: Clock) -> None:
    size = CallSize(15.0)
    for _ in range(20):
        call(size, clock, size.value, 0.0)
    assert size.value == MAX_CALL_SIZE


def test_a_call_that_fails_is_a_lesson_too(clock: Clock) -> None:
    size = CallSize(15.0)

    def fail() -> None:
        with size.measured(50):
            clock.now += 150.0
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        fail()
    assert size.value == 5
