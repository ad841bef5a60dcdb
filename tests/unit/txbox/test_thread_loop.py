"""Threads that must not end before their time."""

import logging

import pytest

from txbox.thread_loop import run_until_return


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
