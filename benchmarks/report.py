"""Figures as tables for a person, and as JSON for a program."""

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rounds import Figures, Spread

__all__ = ["Target", "print_figures", "print_targets", "write_json"]

VERSIONS = ("txbox", "sqlalchemy", "psycopg", "psycopg-binary")


@dataclass(frozen=True)
class Target:
    """What a figure, or the ratio of two, is meant to be.

    Attributes:
        meaning: in words.
        key: the measurement.
        to: what it is divided by; None: it stands by itself.
        bound: the limit of the ratio, or of the value.
        at_least: whether the bound is the least or the most.
    """

    meaning: str
    key: str
    to: str | None
    bound: float
    at_least: bool

    def measured(self, figures: Figures) -> Spread | None:
        """Return what it came to; None if it was not measured."""
        if self.to is not None:
            return figures.ratio(self.key, self.to)
        return figures.spread(self.key) if self.key in figures else None

    def is_met(self, spread: Spread) -> bool:
        """Whether the median is within the bound."""
        return spread.median >= self.bound if self.at_least else spread.median <= self.bound


def print_figures(console: Console, title: str, figures: Figures, rows: Sequence[tuple[str, str | None]]) -> None:
    """Print measurements under a title, each beside its ratio to another one.

    Beside them, where they are known, the client's processor time for a message, which moves less than the rate does,
    and how long the server waited for the disk at a commit: where that differs between rows, so do their rates.

    Args:
        console: where to.
        title: above the table.
        figures: what was measured.
        rows: a measurement's key, and the key of what it is held against; what was not measured is left out.
    """
    shown = [(key, to) for key, to in rows if key in figures]
    if not shown:
        return
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("median", "min - max", "ratio", "min - max", "client us", "WAL sync us"):
        table.add_column(heading, justify="right")
    for key, to in shown:
        spread = figures.spread(key)
        ratio = figures.ratio(key, to) if to is not None else None
        table.add_row(
            key,
            f"{_number(spread.median)} {figures.units[key]}",
            f"{_number(spread.lowest)} - {_number(spread.highest)}",
            f"{ratio.median:.2f}x" if ratio else "",
            f"{ratio.lowest:.2f} - {ratio.highest:.2f}" if ratio else "",
            *(_detail(figures, key, name) for name in ("cpu_us", "wal_sync_us")),
        )
    console.print(table)


def print_targets(console: Console, figures: Figures, targets: Sequence[Target]) -> None:
    """Print what was aimed at beside what was measured."""
    table = Table(title="targets", title_justify="left")
    for heading in ("what", "target", "measured", "min - max", ""):
        table.add_column(heading, justify="left" if heading in ("what", "") else "right")
    for target in targets:
        spread = target.measured(figures)
        if spread is None:
            continue
        suffix = "x" if target.to is not None else f" {figures.units[target.key]}"
        table.add_row(
            target.meaning,
            f"{'>=' if target.at_least else '<='} {target.bound:g}{suffix}",
            f"{spread.median:.2f}{suffix}",
            f"{spread.lowest:.2f} - {spread.highest:.2f}",
            "[green]met[/]" if target.is_met(spread) else "[red]not met[/]",
        )
    if table.row_count:
        console.print(table)


def write_json(
    path: Path, figures: Figures, targets: Sequence[Target], options: Mapping[str, object], server: Mapping[str, object]
) -> None:
    """Write every raw figure, the targets, and on what it was measured."""
    judged = []
    for target in targets:
        spread = target.measured(figures)
        if spread is not None:
            judged.append(asdict(target) | {"measured": asdict(spread), "met": target.is_met(spread)})
    document = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": dict(options),
        "machine": {
            "processors": os.cpu_count(),
            "system": platform.system(),
            "release": platform.release(),
            "python": platform.python_version(),
        },
        "versions": {name: _version(name) for name in VERSIONS},
        "server": dict(server),
        "figures": {
            key: {
                "unit": figures.units[key],
                "spread": asdict(figures.spread(key)),
                "samples": [{"value": sample.value, **sample.details} for sample in samples],
            }
            for key, samples in figures.samples.items()
        },
        "targets": judged,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _detail(figures: Figures, key: str, name: str) -> str:
    """Return the median of what was seen beside the values; nothing if it was not."""
    seen = [sample.details[name] for sample in figures.samples[key] if sample.details.get(name)]
    return _number(statistics.median(seen)) if seen else ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
