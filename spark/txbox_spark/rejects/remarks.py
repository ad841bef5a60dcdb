"""What a load reports about rows it does not simply apply: rejected rows, and differing rows with the same id."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from txbox import TxboxError

SHOWN_ROWS = 10
"""How many rejected rows are shown for a load, and kept for each of its chunks."""

SHOWN_CAUSES = 20
"""How many causes are counted separately; rows with other causes are counted together."""

SHOWN_CHARACTERS = 300

VALUE_CHARACTERS = 40
"""How much is kept of the value that a row is rejected for."""

OTHER_CAUSES = "other causes"


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row of the source that cannot be loaded.

    Attributes:
        cause: why, without values of the row.
        column: the column that the cause is about; None if it is about none, or the column is unknown.
        value: how that column's value begins.
        message_id: the row's id, if it is text.
        file: the file that the row was read from, if known.
        event: the row as JSON, or the text of a record that cannot be read.
    """

    cause: str
    column: str | None = None
    value: str | None = None
    message_id: str | None = None
    file: str | None = None
    event: str = ""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the row from Spark's JSON, which leaves nulls out."""
        return cls(**json.loads(text))

    @property
    def shown(self) -> str:
        """The cause, and how the row begins."""
        return f"{self.cause}: {self.event[:SHOWN_CHARACTERS]}"


@dataclass(frozen=True, slots=True)
class RejectedCause:
    """Rejected rows with the same cause.

    Attributes:
        cause, column: those of each row.
        rows: how many rows there are.
        value: how their value begins, if it is the same in all of them.
        example: how one of the rows begins.
    """

    cause: str
    column: str | None
    rows: int
    value: str | None
    example: str

    def __add__(self, other: "RejectedCause") -> "RejectedCause":
        value = self.value if self.value == other.value else None
        return replace(self, rows=self.rows + other.rows, value=value)


@dataclass(frozen=True, slots=True)
class Remarks:
    """What a load reports about some rows.

    Attributes:
        causes: why rows were rejected, the cause with the most rows first.
        sample: some rejected rows, each after its cause.
        differing: how many ids have rows that differ.
        differing_sample: some of those ids.
    """

    causes: tuple[RejectedCause, ...] = ()
    sample: tuple[str, ...] = ()
    differing: int = 0
    differing_sample: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[RejectedRow]) -> Self:
        """Return the remarks on rejected rows, counted by cause."""
        counted: dict[tuple[str, str | None], RejectedCause] = {}
        sample: list[str] = []
        for row in rows:
            one = RejectedCause(row.cause, row.column, 1, row.value, row.event[:SHOWN_CHARACTERS])
            _count(counted, one)
            if len(sample) < SHOWN_ROWS:
                sample.append(row.shown)
        return cls(_sorted(counted), tuple(sample))

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the remarks that ``as_json`` wrote; an older txbox stored only a sample."""
        if not isinstance(value, Mapping):
            return cls((), tuple(value or ()))
        return cls(
            tuple(RejectedCause(**one) for one in value["causes"]),
            tuple(value["sample"]),
            value["differing"],
            tuple(value["differing_sample"]),
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __bool__(self) -> bool:
        return self != NO_REMARKS

    def __add__(self, other: "Remarks") -> "Remarks":
        if not (self and other):
            return self or other
        counted: dict[tuple[str, str | None], RejectedCause] = {}
        for one in (*self.causes, *other.causes):
            _count(counted, one)
        return Remarks(
            _sorted(counted),
            (*self.sample, *other.sample)[:SHOWN_ROWS],
            self.differing + other.differing,
            (*self.differing_sample, *other.differing_sample)[:SHOWN_ROWS],
        )


NO_REMARKS = Remarks()


class TooManyRejected(TxboxError):
    """More rows are rejected than the caller allows.

    Attributes:
        rejected: how many rows are rejected, at least.
        most: how many the caller allows.
        rows: causes and a sample of the rejected rows.
    """

    def __init__(self, rejected: int, most: int, rows: Remarks) -> None:
        self.rejected = rejected
        self.most = most
        self.rows = rows
        causes = ", ".join(f"{one.rows:,} for {one.cause}" for one in rows.causes[:3])
        super().__init__(
            f"{rejected:,} rows are rejected, more than the {most:,} that may be"
            + (f"; among them {causes}" if causes else "")
        )


def refuse_too_many(rejected: int, most: int | None, rows: Remarks) -> None:
    if most is not None and rejected > most:
        raise TooManyRejected(rejected, most, rows)


def _count(counted: dict[tuple[str, str | None], RejectedCause], one: RejectedCause) -> None:
    key = one.cause, one.column
    if key not in counted and len(counted) >= SHOWN_CAUSES:
        key, one = (OTHER_CAUSES, None), replace(one, cause=OTHER_CAUSES, column=None, value=None)
    before = counted.get(key)
    counted[key] = one if before is None else before + one


def _sorted(counted: Mapping[Any, RejectedCause]) -> tuple[RejectedCause, ...]:
    return tuple(sorted(counted.values(), key=lambda one: (-one.rows, one.cause, one.column or "")))
