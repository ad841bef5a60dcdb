"""Break the code in each way of the catalogue, and see the test that is named there go red.

::

    .venv/bin/python tests/mutations/run.py [--road ROAD] [--only NUMBER] [--jobs 2]

It works in copies of the repository. First the tests run on a copy as it is, and have to pass; then each mutation is
applied by itself. The exit status is 0 if every one went red, 1 if one survived or could not be judged. Tests start a
Postgres for each mutation, unless ``TXBOX_TEST_DATABASE_URL`` names one.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue

from catalogue import MUTATIONS, REPOSITORY, Mutation

ROOTS = ("inbox", "workers", "spark", "migrations")
"""The folders that hold our packages; the editable install leads to those of the repository."""

SECONDS = 300.0
"""How long the test of a mutation may take."""

SHOWN_LINES = 20
"""Of the output of tests that could not be judged."""

FIND_PACKAGES = "import importlib.util, sys; [print(importlib.util.find_spec(one).origin) for one in sys.argv[1:]]"


class Verdict(StrEnum):
    """What became of a mutation."""

    RED = "red"
    """Its test has failed."""
    SURVIVED = "SURVIVED"
    """Its test has passed."""
    UNCLEAR = "UNCLEAR"
    """Its test was not found, did not end in time, or could not be run."""


@dataclass(frozen=True, slots=True)
class TestRun:
    """Tests that have run."""

    verdict: Verdict
    seconds: float
    output: str

    @property
    def end(self) -> str:
        """The last lines of the output."""
        return "\n".join(self.output.splitlines()[-SHOWN_LINES:])


class Copy:
    """A copy of the repository, in which tests run."""

    def __init__(self, folder: Path) -> None:
        """Make the copy; raises ``RuntimeError`` if Python would import the packages of another place."""
        self._folder = folder.resolve()
        shutil.copytree(REPOSITORY, self._folder, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        path = os.pathsep.join(str(self._folder / root) for root in ROOTS)
        self._environment = {**os.environ, "PYTHONPATH": path}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)  # each run would compile everything anew
        self._require_own_packages()

    def _require_own_packages(self) -> None:
        packages = [one.parent.name for root in ROOTS for one in (self._folder / root).glob("*/__init__.py")]
        found = subprocess.run(
            [sys.executable, "-c", FIND_PACKAGES, *packages],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        if foreign := [one for one in found if not Path(one).is_relative_to(self._folder)]:
            raise RuntimeError(f"tests would import {foreign[0]} in place of the copy in {self._folder}")

    def run(self, selections: Sequence[str], *, timeout: float | None = SECONDS) -> TestRun:
        """Run tests, up to the first that fails."""
        begun = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *selections],
                cwd=self._folder,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            return TestRun(Verdict.UNCLEAR, time.monotonic() - begun, f"the tests did not end in {late.timeout:.0f} s")
        verdict = {0: Verdict.SURVIVED, 1: Verdict.RED}.get(done.returncode, Verdict.UNCLEAR)
        return TestRun(verdict, time.monotonic() - begun, done.stdout)

    def judge(self, mutation: Mutation) -> TestRun:
        """Apply a mutation, run its test, and take the mutation back."""
        file = self._folder / mutation.file
        before, times = file.read_text(), file.stat()
        file.write_text(mutation.apply(before))
        try:
            return self.run([mutation.test])
        finally:
            file.write_text(before)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # Python tells compiled files by these


def main() -> int:
    """Run the program, and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--road", choices=sorted({one.road for one in MUTATIONS}), help="only mutations of this road")
    parser.add_argument("--only", type=int, action="append", metavar="NUMBER", help="only this one; again for more")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at once; 2 by default")
    asked = parser.parse_args()
    chosen = [
        (number, one)
        for number, one in enumerate(MUTATIONS, 1)
        if asked.road in (None, one.road) and (asked.only is None or number in asked.only)
    ]
    if not chosen:
        parser.error("there is no such mutation")
    try:
        for _, mutation in chosen:
            mutation.apply((REPOSITORY / mutation.file).read_text())
    except (ValueError, OSError) as error:
        parser.exit(1, f"the catalogue does not fit the source: {error}\n")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="txbox-mutations-") as place:
        Path(place).chmod(0o755)  # where root runs the tests, another user runs the servers
        copies = [Copy(Path(place) / str(number)) for number in range(max(1, min(asked.jobs, len(chosen))))]
        unbroken = copies[0].run(sorted({one.test for _, one in chosen}), timeout=None)
        if unbroken.verdict is not Verdict.SURVIVED:
            say(f"{unbroken.end}\nthe tests do not pass without a mutation")
            return 1
        say(f"without a mutation, all tests pass in {unbroken.seconds:.0f} s")
        verdicts = judge_all(chosen, copies)
    counted = ", ".join(f"{verdicts[one]} {one}" for one in Verdict if verdicts[one])
    say(f"{len(chosen)} mutations in {time.monotonic() - begun:.0f} s: {counted}")
    return 0 if verdicts[Verdict.RED] == len(chosen) else 1


def judge_all(chosen: Sequence[tuple[int, Mutation]], copies: Sequence[Copy]) -> Counter[Verdict]:
    """Judge mutations, one at a time in each copy, and say what becomes of each."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def judge(numbered: tuple[int, Mutation]) -> TestRun:
        copy = free.get()
        try:
            return copy.judge(numbered[1])
        finally:
            free.put(copy)

    verdicts: Counter[Verdict] = Counter()
    with ThreadPoolExecutor(len(copies)) as pool:
        for (number, mutation), tests in zip(chosen, pool.map(judge, chosen), strict=True):
            verdicts[tests.verdict] += 1
            say(f"{tests.verdict:8} {tests.seconds:5.1f} s  {number:3}  {mutation.road}: {mutation.breaks}")
            if tests.verdict is not Verdict.RED:
                say(f"  {mutation.file}\n  {mutation.test}")
            if tests.verdict is Verdict.UNCLEAR:
                say(tests.end)
    return verdicts


def say(line: str) -> None:
    """Write a line, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
