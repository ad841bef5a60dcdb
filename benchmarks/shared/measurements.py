"""Measurements in rounds, and their figures.

A round measures A B C …, so that a machine that slows down slows every side down.
"""

import json
import os
import platform
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

VERSIONS = ("txbox", "sqlalchemy", "psycopg", "pyspark")


class WrongResult(Exception):
    """A measurement left something else in the database than it did: its figure is not valid."""


@dataclass(frozen=True)
class Sample:
    """One measured value, and what else was seen beside it; ``cpu_us`` is the client's processor time for a unit."""

    value: float
    details: Mapping[str, float] = field(default_factory=dict)

    def rounded(self) -> dict[str, float]:
        """Return the value and the details with as many digits as a file needs."""
        return {name: round(number, 3) for name, number in {"value": self.value, **self.details}.items()}


@dataclass(frozen=True)
class Row:
    """Something that is measured, or a ratio of two such things: a line of a table.

    Attributes:
        key: names it.
        run: measures once: one sample, or samples for this key and those of other rows; None: another row measures it.
        to: the key that it is divided by; None: it stands by itself.
        at_least, at_most: what the ratio, or the value, is meant to be; judged by the median.
        unit: of its values.
        ours: whether it measures txbox.
    """

    key: str
    run: Callable[[], Sample | Mapping[str, Sample]] | None = None
    to: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    unit: str = "/s"
    ours: bool = False

    def measured(self, figures: "Figures") -> "Spread | None":
        """Return the ratio, or the value where there is none; None if it was not measured."""
        if self.to is not None:
            return figures.ratio(self.key, self.to)
        return figures.spread(self.key) if self.key in figures else None

    def is_met(self, figures: "Figures") -> bool | None:
        """Whether the target is met; None if there is none, or nothing was measured."""
        spread = self.measured(figures)
        if spread is None or (self.at_least is None and self.at_most is None):
            return None
        at_least, at_most = self.at_least, self.at_most
        return (at_least is None or at_least <= spread.median) and (at_most is None or spread.median <= at_most)


class Table(NamedTuple):
    """Figures that are shown together; ``plotted`` if they belong to the plot, too."""

    title: str
    rows: Sequence[Row]
    plotted: bool = True


class Spread(NamedTuple):
    """The median of some values, the lowest and the highest."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Describe values."""
        return cls(statistics.median(values), min(values), max(values))


class Figures:
    """What was measured: for each key, one sample for each round.

    Attributes:
        options: of the run.
        samples: by key.
        origin: when, on what machine, with which versions it was measured, perhaps with a note: as ``write`` writes it.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.samples: dict[str, list[Sample]] = {}
        self.origin: dict[str, Any] = {
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {
                "processors": os.cpu_count(),
                "processor": _processor(),
                "system": platform.system(),
                "load": round(os.getloadavg()[0], 1),
            },
            "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in VERSIONS},
        }

    def __contains__(self, key: str) -> bool:
        return key in self.samples

    def spread(self, key: str) -> Spread:
        """Describe what was measured under a key."""
        return Spread.of([sample.value for sample in self.samples[key]])

    def detail(self, key: str, name: str) -> float | None:
        """Return the median of a detail; None if it was not seen."""
        seen = [sample.details[name] for sample in self.samples[key] if name in sample.details]
        return statistics.median(seen) if seen else None

    def ratio(self, key: str, to: str) -> Spread | None:
        """Describe the ratio of two measurements, round by round; None where one of them was left out."""
        if key not in self or to not in self:
            return None
        pairs = zip(self.samples[key], self.samples[to], strict=False)
        return Spread.of([above.value / below.value for above, below in pairs])

    def write(self, path: Path, tables: Sequence[Table]) -> None:
        """Write every sample, the targets, and on what it was measured; a figure is a line."""
        targets = [
            {"key": row.key, "to": row.to, "at_least": row.at_least, "at_most": row.at_most, "met": met}
            for table in tables
            for row in table.rows
            if (met := row.is_met(self)) is not None
        ]
        figures = {key: [sample.rounded() for sample in samples] for key, samples in self.samples.items()}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in figures.items()]
        parts = {"options": self.options, **self.origin, "targets": targets}
        head = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in parts.items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{\n" + ",\n".join([*head, ' "figures": {\n' + ",\n".join(lines) + "\n }"]) + "\n}\n")

    @classmethod
    def read(cls, path: Path) -> "Figures":
        """Read what ``write`` has written."""
        document = json.loads(path.read_text())
        figures = cls(document["options"])
        figures.origin = document
        for key, figure in document["figures"].items():
            figures.samples[key] = [Sample(sample.pop("value"), sample) for sample in figure]
        return figures


def measure(tables: Sequence[Table], only: str, rounds: int, figures: Figures, report: Callable[[str], None]) -> None:
    """Measure every row, as many times as there are rounds.

    Args:
        tables: their rows in the order of each round: sides that are compared follow each other.
        only: a pattern of the keys that are measured.
        rounds: how many.
        figures: where the samples go.
        report: is given a line for each sample.
    """
    units = {row.key: row.unit for table in tables for row in table.rows}
    chosen = [row for table in tables for row in table.rows if row.run and re.search(only, row.key)]
    for number in range(rounds):
        for index, row in enumerate(chosen, number * len(chosen) + 1):
            found = row.run() if row.run else {}
            for key, sample in ({row.key: found} if isinstance(found, Sample) else found).items():
                figures.samples.setdefault(key, []).append(sample)
                report(f"[{index}/{rounds * len(chosen)}] {key}: {sample.value:,.1f} {units[key]}")


def _processor() -> str:
    """The processor's name, where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
