"""However a request to end comes out, a command ends as interrupted."""

import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from txbox_cli.signals import (
    ended_in_time,
    hangup_terminates,
    interrupted_plainly,
    seen_as_interrupt,
    terminated_as_interrupt,
)


@pytest.fixture(autouse=True)
def _handlers_put_back() -> object:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class InterruptedFinalizer:
    """Python shows what its finalizer raises, and drops it."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def lose_an_interrupt(over: threading.Event) -> None:
    InterruptedFinalizer()
    over.wait(20)


def test_an_interrupt_that_comes_out_of_a_finalizer_comes_again_and_is_not_shown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    killed, hook = threading.Event(), sys.unraisablehook
    with terminated_as_interrupt():
        interrupted_plainly(lambda: None)
        with pytest.raises(KeyboardInterrupt), seen_as_interrupt(), ended_in_time(killed.set):
            lose_an_interrupt(killed)
    assert not killed.is_set()
    assert capfd.readouterr().err == ""
    assert sys.unraisablehook is hook


AT_EXIT = """
import atexit, signal, sys
import txbox_cli
atexit.register(signal.raise_signal, signal.SIGINT)
sys.argv[1:] = ["--version"]
txbox_cli.main()
"""


def test_an_interrupt_while_python_ends_shows_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")
    assert ended.stdout.startswith("txbox ")


def test_any_other_error_stays_what_it_is_although_an_earlier_command_was_interrupted() -> None:
    with terminated_as_interrupt(), suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGHUP)
    with terminated_as_interrupt(), pytest.raises(ConnectionError), seen_as_interrupt():
        raise ConnectionError("answer is empty")


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
