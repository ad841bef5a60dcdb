"""The dispatcher's parts: the order of keys, and how many messages a publisher is given at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txbox.relay import dispatcher
from txbox.relay.dispatcher import FIRST_CALL_SIZE, MAX_CALL_SIZE, CallSize, KeyOrder


def test_a_round_has_the_next_message_of_every_key_and_the_first_has_all_without_one() -> None:
    order = KeyOrder([("a", 1), (None, 2), ("b", 3), ("a", 4), (None, 5), ("a", 6), ("b", 7)])
    assert [sorted(messages) for messages in order] == [[1, 2, 3, 5], [4, 7], [6]]


def test_a_key_that_is_stopped_hands_out_no_more() -> None:
    order = KeyOrder([("a", 1), ("b", 2), ("a", 3), ("b", 4), ("a", 5)])
    handed = []
    for messages in order:
        handed.append(sorted(messages))
        order.stop("a")
    assert handed == [[1, 2], [4]]


@given(st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers())))
def test_every_message_is_handed_out_once_in_the_order_of_its_key(messages: list[tuple[int | None, int]]) -> None:
    numbered = [(key, (key, number)) for number, (key, _) in enumerate(messages)]
    handed = [one for messages in KeyOrder(numbered) for one in messages]
    assert sorted(handed, key=lambda one: one[1]) == [one for _, one in numbered]
    for key in range(4):
        of_key = [number for mine, number in handed if mine == key]
        assert of_key == sorted(of_key)


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
