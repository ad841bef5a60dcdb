"""However a request to end comes out, a command ends as interrupted."""

import os
import signal
from contextlib import suppress

import pytest

from txbox_cli.signals import hangup_terminates, interrupted_plainly, seen_as_interrupt, terminated_as_interrupt


@pytest.fixture(autouse=True)
def _handlers_put_back() -> object:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def break_by(number: signal.Signals) -> None:
    with suppress(KeyboardInterrupt):  # as Python does where one comes out of a finalizer
        os.kill(os.getpid(), number)
        signal.pause()
    raise ConnectionError("answer is empty")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_breaks_because_of_an_interrupt_is_one(number: signal.Signals) -> None:
    with terminated_as_interrupt():
        interrupted_plainly(lambda: None)
        with pytest.raises(KeyboardInterrupt) as raised, seen_as_interrupt():
            break_by(number)
    assert isinstance(raised.value.__cause__, ConnectionError)


def test_any_other_error_stays_what_it_is() -> None:
    with terminated_as_interrupt(), pytest.raises(ConnectionError), seen_as_interrupt():
        raise ConnectionError("answer is empty")


def test_an_earlier_command_of_the_process_is_forgotten() -> None:
    with terminated_as_interrupt(), suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    test_any_other_error_stays_what_it_is()


def test_the_end_of_the_terminal_terminates_unless_it_is_ignored() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with hangup_terminates():
            signal.raise_signal(signal.SIGHUP)
        assert (got, signal.getsignal(signal.SIGHUP)) == ([signal.SIGTERM], signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with hangup_terminates():
            signal.raise_signal(signal.SIGHUP)
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, before)


def test_what_is_to_be_quiet_is_told_before_anything_breaks() -> None:
    told: list[str] = []
    with terminated_as_interrupt():
        interrupted_plainly(lambda: told.append("now"))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert told == ["now"]
    with terminated_as_interrupt(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert told == ["now"], "another command of the process"
