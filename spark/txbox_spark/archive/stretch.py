"""Stretches: the days that one run has added to an archive, and what their folders hold."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

SENT = "sent"
PROCESSED = "processed"
KINDS = (SENT, PROCESSED)
"""The folders below an archive."""

DAY = "day"
"""The column, and the part of a path, that has the day: in UTC, as 2026-11-20."""

BEGINNING = datetime(1, 1, 1, tzinfo=UTC)
"""Before all that was ever sent: where the first stretch begins."""


@dataclass(frozen=True, slots=True)
class ArchivedDay:
    """A day of one kind: its rows, and its files by name with their sizes in bytes."""

    rows: int
    files: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Days that were added at once; those without rows have no folder.

    Attributes:
        archive_id: of the archive.
        run: which run has written it; names the folder in which it did.
        first: the begin of its first day; ``BEGINNING`` for the first stretch.
        beyond: the end of its last day.
        days: by kind and day.
    """

    archive_id: str
    run: str
    first: datetime
    beyond: datetime
    days: Mapping[str, Mapping[str, ArchivedDay]]

    def rows(self, kind: str) -> int:
        """Return how many rows of a kind it has."""
        return sum(day.rows for day in self.days[kind].values())

    @property
    def name(self) -> str:
        """The name of its file: one for each begin, so no two stretches of an archive can have the same days."""
        return f"{self.first.date().isoformat()}.json"

    def as_json(self) -> str:
        """Return it as JSON."""
        days = {
            kind: {day: {"rows": one.rows, "files": dict(one.files)} for day, one in of_kind.items()}
            for kind, of_kind in self.days.items()
        }
        values = {
            "format": _FORMAT,
            "archive_id": self.archive_id,
            "run": self.run,
            "first": self.first.isoformat(),
            "beyond": self.beyond.isoformat(),
            "days": days,
        }
        return json.dumps(values, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return what ``as_json`` has written.

        Raises:
            ValueError: it is of a later version, or none.
        """
        if values.get("format") != _FORMAT:
            raise ValueError(f"format {values.get('format')!r} is not known to this version of txbox")
        days = {
            kind: {day: ArchivedDay(one["rows"], one["files"]) for day, one in values["days"][kind].items()}
            for kind in KINDS
        }
        first, beyond = (datetime.fromisoformat(values[name]) for name in ("first", "beyond"))
        return cls(values["archive_id"], values["run"], first, beyond, days)


_FORMAT = 1
