import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from txbox_local import process_keeper

pytestmark = pytest.mark.chaos

Gone = Callable[[list[psutil.Process]], bool]


def connect(owner: Any) -> "psycopg.Connection[tuple[Any, ...]]":
    return psycopg.connect(owner.report["postgres"]["url"].replace("+psycopg", ""), autocommit=True)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
@pytest.mark.parametrize("kind", ["postgres", "aws"])
def test_killing_the_keeper_ends_the_server(start_owner: Callable[..., Any], gone: Gone, kind: str) -> None:
    owner = start_owner(None, kind)
    processes = owner.servers()
    os.kill(owner.report[kind]["keeper"], signal.SIGKILL)
    assert gone(processes[1:])
    owner.process.stdin.close()
    assert owner.process.wait() == 0


def test_killing_everything_at_once(start_owner: Callable[..., Any], reachable: Path) -> None:
    owner = start_owner(reachable / "kept")
    processes = owner.servers()
    for one in [owner.process.pid, processes[0].pid, owner.report["postgres"]["pid"]]:
        os.kill(one, signal.SIGKILL)
    owner.process.wait()
    again = start_owner(reachable / "kept")
    with connect(again) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_an_interrupt_from_the_terminal_reaches_only_the_parent(start_owner: Callable[..., Any]) -> None:
    owner = start_owner(None, start_new_session=True)
    assert os.getpgid(owner.report["postgres"]["keeper"]) != os.getpgid(owner.process.pid)
    assert os.getpgid(owner.report["postgres"]["pid"]) != os.getpgid(owner.process.pid)


STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.alarm(60)  # so that a test that fails ends all the same
print("up", flush=True)
signal.pause()  # an ignored signal does not end it
"""


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_server_that_ignores_its_stop_signal_is_killed(by_signal: bool) -> None:
    command = [sys.executable, process_keeper.__file__, "--stop-timeout=0.2", "--share-stdout", "--"]
    command += [sys.executable, "-c", STUBBORN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert {process.stdout.readline().split()[0] for _ in range(2)} == {"pid", "up"}
        started = time.monotonic()
        if by_signal:
            process.send_signal(signal.SIGTERM)
        else:
            process.stdin.close()
        assert process.wait(timeout=20) == 128 + signal.SIGKILL
        assert time.monotonic() - started >= 0.2


def test_the_keeper_passes_on_the_exit_status() -> None:
    command = [sys.executable, process_keeper.__file__, "--", sys.executable, "-c", "raise SystemExit(7)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.wait(timeout=20) == 7
