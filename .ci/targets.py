"""Run the targets of `make ci`, say how long each took, and what it may take: targets.py [TARGET...]

A row of targets runs beside the next one in the same stage, where each keeps one core busy: what these print comes when
they have ended. The first failure ends the run, once its neighbours have ended.
"""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

STAGES = [
    [["setup"]],
    [["lint", "lint-monitoring", "types", "wheel"], ["docs", "test-browser"]],
    [["test"]],
    [["chaos"]],
    [["test-pages"], ["demo", "test-versions"]],
    [["test-containers"]],
]
"""Stages, one after the other; of each, rows that run side by side; of each, targets one after the other."""

BUDGET_SECONDS = {
    "setup": 60,
    "lint": 20,
    "lint-monitoring": 15,
    "types": 75,
    "docs": 45,
    "wheel": 100,
    "test-browser": 165,
    "test": 900,
    "chaos": 660,
    "test-pages": 660,
    "demo": 150,
    "test-versions": 300,
    "test-containers": 330,
}
"""What each target may take on two quiet cores; CONTRIBUTING.md says what to do when one takes longer."""

WHOLE_SECONDS = 47 * 60
"""What all of it may take on two quiet cores."""

LIMIT_SECONDS = 80 * 60
"""A busy machine takes longer, so the run fails only when it takes longer than this."""


class Run:
    """A run of targets."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: str | None = None
        self._output = threading.Lock()

    def row(self, targets: list[str], alone: bool) -> None:
        """Run targets, one after the other, until one has failed, here or in another row."""
        for target in targets:
            if self.failed is not None:
                return
            if alone:
                print(f"--- make {target}", flush=True)
            begun = time.monotonic()
            ended = subprocess.run(
                ["make", "--no-print-directory", target],
                stdin=subprocess.DEVNULL,
                stdout=None if alone else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
            self.seconds[target] = time.monotonic() - begun
            with self._output:
                if not alone:
                    print(f"--- make {target}\n{ended.stdout}", flush=True)
                print(f"--- make {target} took {self.seconds[target]:.0f} s", flush=True)
                if ended.returncode and self.failed is None:
                    self.failed = target

    def stage(self, rows: list[list[str]]) -> None:
        """Run rows of targets side by side."""
        rows = [row for row in rows if row]
        with ThreadPoolExecutor() as pool:
            for ended in [pool.submit(self.row, row, len(rows) == 1) for row in rows]:
                ended.result()


def main(chosen: list[str]) -> int:
    """Run the targets that were named, or all of them; return the exit status."""
    if unknown := set(chosen) - set(BUDGET_SECONDS):
        known = ", ".join(BUDGET_SECONDS)
        print(f"there is no budget for {', '.join(sorted(unknown))}: {known} have one", file=sys.stderr)
        return 2
    run = Run()
    begun = time.monotonic()
    for rows in STAGES:
        if run.failed is None:
            run.stage([[target for target in row if not chosen or target in chosen] for row in rows])
    whole = time.monotonic() - begun
    machine = f"(load {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores)"
    print(f"{'target':16} {'took':>7} {'budget':>7}")
    for target, seconds in run.seconds.items():
        over = "  over its budget" if seconds > BUDGET_SECONDS[target] else ""
        print(f"{target:16} {seconds:5.0f} s {BUDGET_SECONDS[target]:5} s{over}")
    print(f"{'all of it':16} {whole:5.0f} s {WHOLE_SECONDS:5} s  {machine}", flush=True)
    if run.failed is not None:
        print(f"make {run.failed} failed: see what it printed above", file=sys.stderr)
        return 1
    if whole > LIMIT_SECONDS:
        print(f"the run took over {LIMIT_SECONDS} s: see CONTRIBUTING.md, The suite's time", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
