"""What `txbox worker --processes` makes of processes that do not start, or that die, without a server."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.program import Ended
from txbox_cli.commands.worker import supervisor

Txbox = Callable[..., Ended]

MODULE = """
import os, signal
from sqlalchemy import create_engine
from txbox import Inbox
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

class Dying(Worker):
    def run(self, timeout, *, started):
        started()
        print("line", flush=True)
        os._exit(3)

class Stuck(Worker):
    counts = {"processed": 2}

    def run(self, timeout, *, started):
        signal.signal(signal.SIGTERM, lambda *_: None)
        started()
        signal.pause()
        return False

engine = create_engine("postgresql+psycopg://u:hunter2@127.0.0.1:1/x")
arguments = dict(inbox=Inbox("billing"), engine=engine, handler=print)
dying = Dying(MemorySource(), **arguments)
stuck = Stuck(MemorySource(), **arguments)

def killed():
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def _billing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "billing.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("target", "status", "fragment"),
    [
        ("billing:other", 2, "module billing has no other; it has dying, stuck"),
        ("billing:killed", 1, "the first process ended by SIGKILL while it started"),
    ],
)
def test_a_start_that_fails_is_one_line_with_its_status(target: str, status: int, fragment: str, txbox: Txbox) -> None:
    ended = txbox("worker", target, "--processes", "2")
    ended.failed_in_one_line(status, fragment)
    assert ended.out == ""


def test_processes_that_die_again_and_again_are_given_up(
    txbox: Txbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "MOST_DEATHS", 2)
    ended = txbox("worker", "--processes=2", "billing:dying")
    ended.failed_in_one_line(1, "gave up: 2 processes in a row ended within 10 s, the last one with status 3; ")
    assert " ended with status 3; another one takes its place\n" in caplog.text
    assert set(ended.out.splitlines()) <= {"line", "billing works on memory in 2 processes; Ctrl-C drains and stops"}


def test_one_that_has_not_drained_is_a_failure_of_all(txbox: Txbox, monkeypatch: pytest.MonkeyPatch) -> None:
    run = supervisor.Supervisor.run

    def told_to_stop(self: supervisor.Supervisor, _: object) -> bool:
        return run(self, lambda _: signal.raise_signal(signal.SIGTERM))

    monkeypatch.setattr(supervisor.Supervisor, "run", told_to_stop)
    ended = txbox("worker", "--processes=2", "--stop-seconds=1", "billing:stuck")
    ended.failed_in_one_line(1, "not drained within 1 s; the rest will be delivered again")
    assert ended.out == "stopped: 4 processed\n"


def test_they_are_not_ready_before_all_have_started() -> None:
    processes = supervisor.Supervisor(lambda _: [], 2, 0)
    assert processes.why_not_ready() == "0 of 2 processes have started"
    assert processes.why_not_live() is None
