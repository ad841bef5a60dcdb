"""Signals that ask to stop: the first one wakes, the second one does what it would have done."""

import queue
import signal
import subprocess
import sys

import pytest

from txbox.service import StopSignals

PROGRAM = """
import queue, signal
from txbox.service import StopSignals

wake = queue.SimpleQueue()
with StopSignals(wake):
    signal.raise_signal(signal.{first})
    print(wake.get().name, flush=True)
    signal.raise_signal(signal.{second})
    print("still here")
"""


def run(first: str, second: str) -> "subprocess.CompletedProcess[str]":
    program = PROGRAM.format(first=first, second=second)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("first", ["SIGTERM", "SIGINT"])
def test_the_second_signal_ends_the_process(first: str) -> None:
    ended = run(first, "SIGTERM")
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, f"{first}\n")


def test_a_second_ctrl_c_is_the_one_that_python_knows() -> None:
    ended = run("SIGTERM", "SIGINT")
    assert ended.stdout == "SIGTERM\n"
    assert "KeyboardInterrupt" in ended.stderr


def test_between_two_signals_there_is_always_a_handler() -> None:
    """Were it gone after the first, one that is under way already would be an OSError in whatever the program does."""
    wake: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(wake):
        signal.raise_signal(signal.SIGTERM)
        assert wake.get() is signal.SIGTERM
        assert callable(signal.getsignal(signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) == before
