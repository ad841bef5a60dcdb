"""Crash points: they end the process as SIGKILL does, at the moment that was named."""

import signal
import subprocess
import sys

from txbox.instrumentation import BrokerRestored, DatabaseRestored
from txbox.testing import kill_at

PROGRAM = """
from txbox.instrumentation import BrokerRestored, DatabaseRestored
from txbox.testing import kill_at

hook = kill_at(BrokerRestored, after={after})
for number in range(5):
    hook(DatabaseRestored("billing", "queue"))
    print(number, flush=True)
    hook(BrokerRestored("billing", "queue"))
"""


def test_the_process_dies_at_the_moment_named_and_not_before() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(after=3)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.split() == ["0", "1", "2"]


def test_other_moments_pass() -> None:
    kill_at(BrokerRestored)(DatabaseRestored("billing", "queue"))
