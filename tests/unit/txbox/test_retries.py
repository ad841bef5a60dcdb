"""Work that is run again after a pause."""

import pytest

from txbox.backoff import Backoff
from txbox.retries import retry

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
