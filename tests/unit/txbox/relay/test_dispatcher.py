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


@pytest.mark.parametrize(
    "calls",  # how many messages, for how many seconds, and how many the next call may have
    [
        pytest.param([(50, 0.01, 200), (200, 0.01, 800)], id="it begins carefully and grows with what is quick"),
        pytest.param([(50, 100.0, 7), (7, 14.0, 7), (1, 60.0, 1)], id="what a slow publisher can do in time"),
        pytest.param([(1, 60.0, 1), (1, 0.001, 4), (4, 0.001, 16), (16, 0.001, 64)], id="one that has recovered"),
        pytest.param([(2, 0.0, FIRST_CALL_SIZE), (2, 0.01, FIRST_CALL_SIZE)], id="a few say little of many"),
        pytest.param([(FIRST_CALL_SIZE * 4**n, 0.0, FIRST_CALL_SIZE * 4 ** (n + 1)) for n in range(5)], id="growth"),
        pytest.param([(MAX_CALL_SIZE, 0.0, MAX_CALL_SIZE)], id="there is an end to growth"),
    ],
)
def test_the_next_call_has_what_fits_the_time(clock: Clock, calls: list[tuple[int, float, int]]) -> None:
    size = CallSize(15.0)
    assert size.value == FIRST_CALL_SIZE
    assert [call(size, clock, count, seconds) for count, seconds, _ in calls] == [expected for _, _, expected in calls]


def test_a_call_that_fails_is_a_lesson_too(clock: Clock) -> None:
    size = CallSize(15.0)

    def fail() -> None:
        with size.measured(50):
            clock.now += 150.0
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        fail()
    assert size.value == 5
