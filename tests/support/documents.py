"""The fenced blocks of a Markdown page, and terminals that run them.

What a block means, its first line says, and readers see the same:

* ``python title="billing.py"``, and so for ``sql`` and ``json``: a file of that name, in the directory of the page's
  terminals;
* ``python``: code that is run here, after the blocks above it on the page;
* ``console title="Terminal 1"``: commands behind ``$``, each followed by what it prints. ``…`` stands for anything.
  A later block of the same terminal that begins with ``^C`` interrupts the last command, which runs on until then;
* ``sql``: statements, run in one transaction.

A block in a tab or a list is indented, and is found without its indent.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from support.waiting import wait_until

COMMAND_SECONDS = 240


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    title: str
    text: str
    line: int

    @property
    def steps(self) -> list[tuple[str, str]]:
        """The commands of a console block, each with what it prints; ``^C`` is one too."""
        steps: list[tuple[str, str]] = []
        for line in self.text.splitlines():
            if line == "^C":
                steps.append(("^C", ""))
            elif line.startswith("$ "):
                steps.append((line[2:], ""))
            elif steps and steps[-1][0].endswith("\\"):
                steps[-1] = (f"{steps[-1][0]}\n{line}", "")
            else:
                command, output = steps[-1]
                steps[-1] = (command, f"{output}{line}\n")
        return steps


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            found["language"],
            found["title"] or "",
            re.sub(f"^{found['indent']}", "", found["text"], flags=re.M),
            text.count("\n", 0, found.start()) + 1,
        )
        for found in _FENCE.finditer(text)
    ]


_FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^(?P=indent)```$', re.M | re.S
)


class Terminals:
    """The terminals of one page: a directory, and for each title an environment and at most one running command."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self.directory = directory
        self._environment = environment
        self._terminals: dict[str, _Terminal] = {}

    def run(self, block: Block, *, goes_on: bool) -> None:
        """Run the commands of a console block, and compare what they print.

        Args:
            block: what to run.
            goes_on: its last command is left running.
        """
        terminal = self._terminals.setdefault(block.title, _Terminal(self.directory, dict(self._environment)))
        steps = block.steps
        for number, (command, expected) in enumerate(steps, start=1):
            if command == "^C":
                terminal.interrupt(expected)
            elif goes_on and number == len(steps):
                terminal.start(command, expected)
            elif any(other.busy for other in self._terminals.values()):
                # What is asked about goes on at its own pace.
                wait_until(lambda: terminal.run(command, expected), command, every=0.2)  # noqa: B023
            else:
                assert terminal.run(command, expected), (
                    f"$ {command}\n{terminal.printed}\n--- the page says:\n{expected}"
                )

    def close(self) -> None:
        """End what is still running."""
        for terminal in self._terminals.values():
            terminal.close()


class _Terminal:
    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._directory = directory
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._seen = 0
        self._good_statuses: tuple[int, ...] = (0,)
        self.printed = ""
        self._log = directory / f".terminal-{id(self)}"

    @property
    def busy(self) -> bool:
        return self._process is not None

    def run(self, command: str, expected: str) -> bool:
        """Run a command that has to succeed, and return whether it prints what is expected."""
        # What `export` and `source` did is there for the next command of this terminal.
        variables = self._directory / f".variables-{id(self)}"
        script = f'{command}\nstatus=$?\nenv -0 > "{variables}"\nexit $status'
        ended = subprocess.run(
            ["bash", "-c", script],
            cwd=self._directory,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert ended.returncode == 0, f"$ {command}\n{ended.stdout}\nexit status {ended.returncode}"
        self._environment = dict(_variables(variables.read_bytes()))
        self.printed = ended.stdout
        return _as_regex(expected).fullmatch(ended.stdout.strip()) is not None

    def start(self, command: str, expected: str) -> None:
        self._good_statuses = (0, 1) if "celery" in command.split() else (0,)  # so Celery ends after Ctrl-C
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self._directory,
                env=self._environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        pattern = _as_regex(expected)
        wait_until(
            lambda: pattern.match(self._text()) or self._process.poll() is not None,  # type: ignore[union-attr]
            f"$ {command} prints:\n{expected}",
            timeout=60,
        )
        assert self._process.poll() is None, f"$ {command} has ended:\n{self._text()}"
        self._seen = len(pattern.match(self._text())[0])  # type: ignore[index]

    def interrupt(self, expected: str) -> None:
        assert self._process is not None, "nothing is running here"
        self._process.send_signal(signal.SIGINT)
        status = self._process.wait(COMMAND_SECONDS)
        self._process = None
        rest = self._text()[self._seen :].strip()
        assert status in self._good_statuses, f"exit status {status}:\n{rest}"
        assert _as_regex(expected).fullmatch(rest), f"{rest}\n--- the page says:\n{expected}"

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            with suppress(ProcessLookupError):  # what it has started, and left behind: a broker would keep its port
                os.killpg(self._process.pid, signal.SIGKILL)

    def _text(self) -> str:
        return self._log.read_text().strip()


def _as_regex(expected: str) -> re.Pattern[str]:
    """Blanks and line breaks match each other, because a table is as wide as its terminal; … matches anything."""
    words = [".*?".join(map(re.escape, word.split("…"))) for word in expected.split()]
    return re.compile(r"\s+".join(words), re.S)


def _variables(dump: bytes) -> Iterator[tuple[str, str]]:
    for entry in dump.decode().split("\0"):
        name, equals, value = entry.partition("=")
        if equals:
            yield name, value


EXAMPLES = Path(__file__).parents[2] / "examples"


def run_readme(name: str, directory: Path) -> None:
    """Run what the README of an example shows, on a copy of it, with servers of its own."""
    shutil.copytree(EXAMPLES / name, directory, dirs_exist_ok=True)
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("TXBOX_", "AWS_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{mine['PATH']}"
    terminals = Terminals(directory, {**mine, "PATH": path, "COLUMNS": "120", "PYTHONDONTWRITEBYTECODE": "1"})
    try:
        found = blocks(EXAMPLES / name / "README.md")
        for number, block in enumerate(found):
            later = next((other for other in found[number + 1 :] if other.title == block.title), None)
            terminals.run(block, goes_on=later is not None and later.text.startswith("^C"))
    finally:
        terminals.close()
