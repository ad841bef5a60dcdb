"""Signals that ask to stop: the first one wakes, the second one does what it would have done."""

import queue
import signal
import subprocess
import sys

from txbox.service import StopSignals

# Each pair has a process of its own, and the imports once.
PROGRAM = """
import os, queue, signal, sys
from txbox.service import StopSignals

def receive(first, second):
    wake = queue.SimpleQueue()
    with StopSignals(wake):
        signal.raise_signal(first)
        print(wake.get().name, end=" ", flush=True)
        signal.raise_signal(second)
        print("still here", flush=True)

for pair in sys.argv[1:]:
    if not (child := os.fork()):
        receive(*(signal.Signals[name] for name in pair.split()))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_the_second_signal_does_what_it_would_have_done() -> None:
    pairs = ("SIGTERM SIGTERM", "SIGINT SIGTERM", "SIGTERM SIGINT")
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *pairs], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.splitlines() == [
        f"SIGTERM {-signal.SIGTERM}",
        f"SIGINT {-signal.SIGTERM}",
        f"SIGTERM {-signal.SIGINT}",
    ]
    assert ended.stderr.count("KeyboardInterrupt") == 1


def test_between_two_signals_there_is_always_a_handler() -> None:
    """Were it gone after the first, one that is under way already would be an OSError in whatever the program does."""
    wake: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(wake):
        signal.raise_signal(signal.SIGTERM)
        assert wake.get() is signal.SIGTERM
        assert callable(signal.getsignal(signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) == before
