"""Programs that run the embedded servers in a process of their own, so that a test can kill it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import ordinary_user
from support.ordinary_user import reachable_directory

GONE_TIMEOUT_S = 20

START = """
import json, sys
from pathlib import Path
from txbox_local import LocalPostgres, LocalAws

directory = Path(sys.argv[1]) if sys.argv[1] != "-" else None
kinds = sys.argv[2].split(",")
servers = {}
if "postgres" in kinds:
    servers["postgres"] = LocalPostgres(directory, durable=False).start()
if "aws" in kinds:
    servers["aws"] = LocalAws().start()
report = {kind: {"pid": server.pid, "keeper": server.keeper_pid} for kind, server in servers.items()}
if "postgres" in servers:
    report["postgres"] |= {"url": servers["postgres"].url, "directory": str(servers["postgres"].directory)}
print(json.dumps(report), flush=True)
sys.stdin.read()
for server in servers.values():
    server.stop()
"""


@dataclass
class Owner:
    """A program that runs servers until its standard input ends."""

    process: subprocess.Popen[str]
    report: dict[str, dict[str, Any]]

    def servers(self) -> list[psutil.Process]:
        """The keepers, the servers and the servers' own children."""
        keepers = [psutil.Process(server["keeper"]) for server in self.report.values()]
        return [*keepers, *(child for keeper in keepers for child in keeper.children(recursive=True))]


@pytest.fixture
def start_owner() -> Iterator[Callable[..., Owner]]:
    owners: list[subprocess.Popen[str]] = []

    def start(
        directory: Path | None = None, kinds: str = "postgres", *, python: str = sys.executable, **options: Any
    ) -> Owner:
        process = subprocess.Popen(
            [python, "-c", START, str(directory or "-"), kinds],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        owners.append(process)
        line = process.stdout.readline()
        assert line, "the program did not start its servers; its error is above"
        return Owner(process, json.loads(line))

    yield start
    for process in owners:
        with process:
            process.stdin.close()


def all_gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=GONE_TIMEOUT_S)
    return not [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def gone() -> Callable[[list[psutil.Process]], bool]:
    return all_gone


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory below which the server's user can reach."""
    with reachable_directory() as directory:
        yield directory


@pytest.fixture
def as_nobody(reachable: Path) -> dict[str, Any]:
    """What to start a program with so that it runs as an ordinary user."""
    return ordinary_user.as_nobody(reachable)
