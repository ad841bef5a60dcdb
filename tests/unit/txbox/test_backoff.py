"""Backoff: the bounds of every wait."""

import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from txbox import InvalidConfiguration
from txbox.backoff import Backoff, retry, run_until_return

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


TWO, HALF = Backoff(first_seconds=2.0, longest_seconds=2.0), Backoff(first_seconds=0.5, longest_seconds=0.5)


class Work:
    """Fails so often, then returns "done"."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.seen: list[tuple[str, int]] = []
        self.pauses: list[float] = []

    def __call__(self) -> str:
        if self.failures:
            self.failures -= 1
            raise ValueError(f"{self.failures} to go")
        return "done"

    def again(self, error: Exception, run: int) -> bool:
        self.seen.append((str(error), run))
        return isinstance(error, ValueError)


def test_work_is_run_until_it_succeeds_with_a_pause_after_each_failure() -> None:
    work = Work(2)
    assert retry(work, again=work.again, backoff=TWO, wait=work.pauses.append) == "done"
    assert work.seen == [("1 to go", 1), ("0 to go", 2)]
    assert [1.0 <= pause <= 2.0 for pause in work.pauses] == [True, True]


def test_the_last_run_raises_what_it_raised_and_nothing_is_waited_for() -> None:
    work = Work(5)
    with pytest.raises(ValueError, match="2 to go"):
        retry(work, again=work.again, backoff=HALF, runs=3, wait=work.pauses.append)
    assert len(work.pauses) == len(work.seen) == 2


def test_what_another_run_cannot_mend_is_raised_at_once() -> None:
    work = Work(5)
    with pytest.raises(ValueError, match="4 to go"):
        retry(work, again=lambda _error, _run: False, backoff=HALF, wait=work.pauses.append)
    assert work.pauses == []


def test_a_wait_that_is_ended_gives_up() -> None:
    work = Work(5)
    with pytest.raises(ValueError, match="4 to go"):
        retry(work, again=work.again, backoff=HALF, wait=lambda _seconds: True)


def test_an_interrupt_is_not_caught() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        retry(interrupted, again=lambda _error, _run: True, backoff=HALF)


class Unprintable(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise ValueError("no text for you")


def test_whatever_is_raised_the_work_goes_on_until_it_returns(caplog: pytest.LogCaptureFixture) -> None:
    errors = [ValueError("one"), SystemExit(1), KeyboardInterrupt(), Unprintable()]
    pauses: list[float] = []

    def work() -> None:
        if errors:
            raise errors.pop(0)

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return False

    with caplog.at_level(logging.ERROR):
        run_until_return(work, name="the work", wait=wait)
    assert len(pauses) == 4
    assert all(0.05 <= pause <= 1.0 for pause in pauses)
    assert "the work raised an unexpected error, and runs again: one" in caplog.messages
    assert "Unprintable (str() of it raised ValueError)" in caplog.text


def test_a_log_that_raises_is_no_reason_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(logging.getLogger("txbox.threads"), "error", broken)
    errors = [ValueError("one")]

    def work() -> None:
        if errors:
            raise errors.pop()

    run_until_return(work, name="the work", wait=lambda _: False)
    assert not errors


def test_it_ends_when_it_is_stopped() -> None:
    def work() -> None:
        raise ValueError("again and again")

    run_until_return(work, name="the work", wait=lambda _: True)
