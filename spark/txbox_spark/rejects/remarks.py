"""What a load remarks of rows that are not applied as they are: rejected ones, and several with one id that differ."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from txbox import TxboxError

SHOWN_ROWS = 10
"""How many rejected rows are shown, for each load and each of its chunks."""

SHOWN_CAUSES = 20
"""How many causes are told apart; rows with other ones are counted together."""

SHOWN_CHARACTERS = 300
"""How much of a rejected row is shown."""

VALUE_CHARACTERS = 40
"""How much is told apart of the value that a row is rejected for."""

OTHER_CAUSES = "other causes"


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row of the source that cannot be loaded.

    Attributes:
        cause: why, without values of the row.
        column: of the value that the cause is about; None if it is about no column, or that is not known.
        value: how that value begins.
        message_id: the row's, as far as it is text.
        file: where the row was read from, if that is known.
        event: the row, as JSON, or as the text of a record that cannot be read.
    """

    cause: str
    column: str | None = None
    value: str | None = None
    message_id: str | None = None
    file: str | None = None
    event: str = ""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what Spark has made JSON of; its nulls are left out."""
        return cls(**json.loads(text))

    @property
    def shown(self) -> str:
        """The cause, and how the row begins."""
        return f"{self.cause}: {self.event[:SHOWN_CHARACTERS]}"


@dataclass(frozen=True, slots=True)
class RejectedCause:
    """Rejected rows with the same cause.

    Attributes:
        cause, column: as of each row.
        rows: how many.
        value: how their value begins, if all of them have the same.
        example: how one of the rows begins.
    """

    cause: str
    column: str | None
    rows: int
    value: str | None
    example: str

    def __add__(self, other: "RejectedCause") -> "RejectedCause":
        """Return the rows of both."""
        value = self.value if self.value == other.value else None
        return replace(self, rows=self.rows + other.rows, value=value)


@dataclass(frozen=True, slots=True)
class Remarks:
    """What is remarked of some rows.

    Attributes:
        causes: of rejected rows, those with the most rows first.
        sample: some rejected rows, each with its cause before it.
        differing: how many ids have rows that differ.
        differing_sample: some of those ids.
    """

    causes: tuple[RejectedCause, ...] = ()
    sample: tuple[str, ...] = ()
    differing: int = 0
    differing_sample: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[RejectedRow]) -> Self:
        """Count rejected rows by their causes."""
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
        """Return what ``as_json`` was made of; what an older txbox has kept is a sample alone."""
        if not isinstance(value, Mapping):
            return cls((), tuple(value or ()))
        return cls(
            tuple(RejectedCause(**one) for one in value["causes"]),
            tuple(value["sample"]),
            value["differing"],
            tuple(value["differing_sample"]),
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    def __bool__(self) -> bool:
        """Whether there is anything to be remarked."""
        return self != NO_REMARKS

    def __add__(self, other: "Remarks") -> "Remarks":
        """Return the remarks of both."""
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
        rejected: how many, at least.
        most: how many may be.
        rows: what is shown of them.
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
    """Raise ``TooManyRejected`` if more rows are rejected than may be."""
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
