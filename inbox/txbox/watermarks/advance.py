"""How an event compares with the watermark of its aggregate. Pure."""

from collections.abc import Sequence
from enum import StrEnum


class Advance(StrEnum):
    """How an event compares with the watermark of its aggregate."""

    APPLIED = "applied"
    """It is above, and the watermark is its sequence now: apply the event in the same transaction."""
    STALE = "stale"
    """It is not above: applied before, or overtaken by a later one. Nothing is to be done."""
    GAP = "gap"
    """It is not the next one, with ``insist``. Nothing has changed: hand it back."""

    def __bool__(self) -> bool:
        raise TypeError(f"Advance.{self.name} is not yes or no: compare with Advance.APPLIED")


def decide(
    before: int | None, sequences: Sequence[int], *, insist: bool = False, first: int = 1
) -> tuple[list[Advance], int | None]:
    """Compare events of one aggregate, in the order in which they count, with its watermark (None: there is none).

    Returns an answer for each event, and the watermark after them. A set of events is decided here only; ``insist`` and
    ``first`` are as for ``Watermarks.advance``.
    """
    answers: list[Advance] = []
    mark = before
    for sequence in sequences:
        seen = first - 1 if insist and mark is None else mark
        if seen is not None and sequence <= seen:
            answers.append(Advance.STALE)
        elif insist and seen is not None and sequence != seen + 1:
            answers.append(Advance.GAP)
        else:
            answers.append(Advance.APPLIED)
            mark = sequence
    return answers, mark
