"""The program ``txbox``, run in this process for speed or in one of its own for truth."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import psutil
import pytest

from support.waiting import wait_until

SCRIPT = Path(sys.executable).with_name("txbox")
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "txbox_cli"]

PASSWORD = "hunter2"  # shown nowhere


def own_module(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, text: str | None = None) -> None:
    """Work in a folder with a module, written there unless it is; it is imported anew, and forgotten after the test."""
    if text is not None:
        (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    del sys.modules[name]


@dataclass(frozen=True)
class Ended:
    """How a run of the program ended."""

    status: int
    out: str
    err: str

    def failed_in_one_line(self, status: int, *fragments: str) -> None:
        """Check that this is how every failure looks."""
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("txbox: ")
        self.said(status, *fragments)

    def failed_with_traceback(self, status: int, *fragments: str) -> None:
        """Check that --debug adds where it comes from, and takes nothing away."""
        assert "Traceback (most recent call last)" in self.err
        assert self.err.splitlines()[-1].startswith("txbox: ")
        self.said(status, *fragments)

    def said(self, status: int, *fragments: str) -> None:
        """Check status and words, and that no password was shown."""
        assert self.status == status, (self.out, self.err)
        for fragment in fragments:
            assert fragment in self.err
        assert PASSWORD not in self.out + self.err


def txbox(*arguments: str, env: Mapping[str, str] | None = None, timeout: float = 120, **options: Any) -> Ended:
    """Run the program to its end."""
    ended = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
        timeout=timeout,
        check=False,
        **options,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def left_in(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


class Running:
    """The program while it runs; what it writes is kept."""

    def __init__(
        self, *arguments: str, command: Sequence[str] = COMMAND, env: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            **options,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=lines.extend, args=(stream,))
            for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def says(self, text: str, *, timeout: float = 40) -> None:
        """Wait until it has said something, on either stream."""

        def said() -> bool:
            if self.process.poll() is not None:
                self.wait()
                assert text in self._all(), f"it ended with {self.process.returncode}: {self._all()}"
            return text in self._all()

        wait_until(said, text, timeout=timeout)

    def _all(self) -> str:
        return "".join([*self.out, *self.err])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this one process."""
        self.process.send_signal(number)

    def wait(self, timeout: float = 40) -> int:
        """Wait for its end; its status, negative for a signal."""
        status = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
