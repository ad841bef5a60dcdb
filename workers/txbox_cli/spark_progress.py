"""How far a job of Spark is: bars in a terminal, lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import Progress, TextColumn

from txbox_cli.output import plain_console, progress_bars

if TYPE_CHECKING:
    from txbox_spark import JobProgress

__all__ = ["Seen", "told"]

SECONDS_PER_LINE = 10.0
"""How often a line is printed where nobody watches, while a stage goes on."""


class Seen:
    """What the progress has told so far."""

    def __init__(self) -> None:
        self.run_id: str | None = None


@contextmanager
def told(seen: Seen, *, silent: bool = False) -> "Iterator[Callable[[JobProgress], None]]":
    """Tell what a job says of its progress.

    Args:
        seen: is kept up to date.
        silent: print nothing.
    """
    console = plain_console(stderr=True)
    if silent or not console.is_terminal:
        yield _Silence(seen) if silent else _Lines(seen)
        return
    with progress_bars(console, TextColumn("{task.fields[remark]}")) as progress:
        yield _Bars(seen, progress)


class _Silence:
    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def __call__(self, job: "JobProgress") -> None:
        self._seen.run_id = job.run_id


class _Lines:
    """Where nobody watches: a line for each stage, and one now and then."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._told = ("", False)
        self._next_at = 0.0

    def __call__(self, job: "JobProgress") -> None:
        self._seen.run_id = job.run_id
        now = time.monotonic()
        if not job.total:  # Spark has not planned it yet
            return
        tells = (job.stage, job.done == job.total)
        if tells == self._told and (now < self._next_at or job.done == job.total):
            return
        run = f"run {job.run_id}, " if job.run_id else ""
        typer.echo(f"{run}{job.stage}: {job.done} of {job.total}{_remark(job)}", err=True)
        self._told, self._next_at = tells, now + SECONDS_PER_LINE


class _Bars:
    """A bar for each stage; the one before is complete when the next one begins."""

    def __init__(self, seen: Seen, progress: Progress) -> None:
        self._seen = seen
        self._progress = progress
        self._tasks: dict[str, Any] = {}
        self._last: tuple[str, int] = ("", 0)

    def __call__(self, job: "JobProgress") -> None:
        self._seen.run_id = job.run_id
        before, total = self._last
        if job.stage not in self._tasks:
            if before:
                self._progress.update(self._tasks[before], completed=total, total=total)
            self._tasks[job.stage] = self._progress.add_task(job.stage, total=None, remark="")
        self._progress.update(
            self._tasks[job.stage], completed=job.done, total=job.total or None, remark=_remark(job).strip(", ")
        )
        self._last = (job.stage, job.total)


def _remark(job: "JobProgress") -> str:
    return f" chunks, {job.applied:,} events applied" if job.stage == "merge" else " tasks"
