"""Backoff: the bounds of every wait."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from txbox import InvalidConfiguration
from txbox.backoff import Backoff

seconds = st.just(0.0) | st.floats(min_value=0.001, max_value=1e6)


@example(bounds=[0.0, 0.0], attempt=5)
@given(bounds=st.tuples(seconds, seconds).map(sorted), attempt=st.integers(min_value=-5, max_value=10**9))
def test_every_wait_lies_in_the_upper_half_of_its_step(bounds: list[float], attempt: int) -> None:
    first, longest = bounds
    wait = Backoff(first_seconds=first, longest_seconds=longest).seconds(attempt)
    step = min(first * 2.0 ** min(max(attempt, 1) - 1, 100), longest)
    assert step / 2 <= wait <= step


def test_workers_that_failed_together_do_not_come_back_together() -> None:
    backoff = Backoff(first_seconds=1.0)
    assert len({backoff.seconds(1) for _ in range(50)}) > 1


@pytest.mark.parametrize(("first", "longest"), [(-1, 10), (11, 10), (float("nan"), 10), (1, float("nan"))])
def test_bounds_that_cannot_be_met_are_refused(first: float, longest: float) -> None:
    with pytest.raises(InvalidConfiguration, match=r"Backoff\.first_seconds must be at least 0 and at most"):
        Backoff(first_seconds=first, longest_seconds=longest)
