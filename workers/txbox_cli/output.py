"""Output for a terminal, and for ``grep``, ``cut`` and ``jq``."""

import json
import queue
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import typer

from txbox_cli.signals import hangup_terminates

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

UNFOLDED_COLUMNS = 10_000
"""Outside a terminal, lines are not wrapped."""


def plain_console(*, stderr: bool = False) -> "Console":
    """Return a console that prints text as it is, and wraps lines only in a terminal."""
    from rich.console import Console

    in_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if in_terminal else UNFOLDED_COLUMNS
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def progress_bars(console: "Console", *more: "ProgressColumn") -> "Progress":
    """Return progress bars for counted work. The columns ``more`` stand between the count and the time."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    counted = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
    return Progress(*counted, *more, TimeElapsedColumn(), console=console)


@contextmanager
def interruptible_progress(*, quiet: bool) -> "Iterator[tuple[Progress, queue.SimpleQueue[signal.Signals | None]]]":
    """Show bars in a terminal, unless ``quiet``. Yield them with a queue of the signals that ask the work to end."""
    from txbox.service import StopSignals

    console = plain_console(stderr=True)
    asked: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
    with hangup_terminates(), StopSignals(asked), progress_bars(console) as progress:
        progress.disable = quiet or not console.is_terminal
        yield progress, asked


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under headings. Each row is one line unless the terminal is too narrow."""
    from rich.table import Table

    table = Table(*headings, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    plain_console().print(table)


def print_counts(rows: Sequence[tuple[str, int | None, str]]) -> None:
    """Print counts: name, count (None: unknown) and remark."""
    from rich.table import Table

    table = Table(show_header=False, box=None)
    justifications: tuple[Literal["left", "right"], ...] = ("left", "right", "left")
    for justify in justifications:
        table.add_column(justify=justify)
    for name, count, remark in rows:
        table.add_row(name, "unknown" if count is None else f"{count:,}", printable(remark))
    plain_console().print(table)


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun: ``1 message``, ``2,000 messages``."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def span(seconds: float) -> str:
    """Return a span of time in its two largest units."""
    if seconds < _MINUTE:
        return f"{seconds:.1f} s" if seconds < 1 else f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds // _MINUTE:.0f} min {seconds % _MINUTE:.0f} s"
    if seconds < _DAY:
        return f"{seconds // _HOUR:.0f} h {seconds % _HOUR // _MINUTE:.0f} min"
    return f"{seconds // _DAY:.0f} d {seconds % _DAY // _HOUR:.0f} h"


def print_json(value: Mapping[str, Any] | list[Any], *, one_line: bool = False) -> None:
    """Print a value as JSON, with times in ISO 8601 and bytes as UTF-8, invalid bytes escaped."""
    typer.echo(json.dumps(value, indent=None if one_line else 2, default=_as_json))


def printable(text: str, *, keep: str = "") -> str:
    """Escape control characters: ids and errors come from outside, and a terminal obeys them.

    Args:
        keep: control characters to leave as they are, such as line ends.
    """
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1] for character in text
    )


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400
