"""The report of a trial: what each fault has led to, and what to do about it."""

from dataclasses import dataclass

from txbox import Outcome
from txbox_testing.comparison import plural

SHARE_THE_TRANSACTION = (
    "Rows that are doubled or lost were not written through the session that the handler is given. Write them through "
    "it, so that they are committed with the message, or not at all."
)
SHARE_THE_CHUNK = (
    "Rows that are doubled or lost were not written by the load's `apply`. Write them there, so that they are "
    "committed with their chunk, or not at all."
)
SHARE_THE_ID = (
    "Effects that are doubled were outside of the database, where no rollback reaches. Publish them to the outbox in "
    "the handler's transaction; or send them with message.id as their idempotency key, and have the receiver refuse "
    "it the second time."
)

LOOK_BEFORE = (
    "Effects that are doubled may have happened in an attempt before: where lease.unknown_attempts is not 0, ask the "
    "receiver before you repeat one; or send them with message.id as their idempotency key, and have it refuse that "
    "the second time."
)


class NotIdempotent(AssertionError):
    """A handler is not idempotent: faults lead to another state than an undisturbed delivery.

    Attributes:
        report: at which points, and what differs.
    """

    def __init__(self, report: "TrialReport") -> None:
        self.report = report
        super().__init__(str(report))


@dataclass(frozen=True, slots=True)
class PointResult:
    """What a fault has led to.

    Attributes:
        name: the fault, as it is called, such as ``crash_at("handled")``.
        title: what it is, in words.
        happened: False if it could not happen to this handler.
        differences: how the state differs from that after an undisturbed delivery; empty if it does not.
        outcomes: of all deliveries.
    """

    name: str
    title: str
    happened: bool
    differences: tuple[str, ...]
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class TrialReport:
    """The result of a trial. Its text is for people.

    Attributes:
        handler: its name.
        points: what each fault has led to, in the order of a delivery's life.
        ignored: the columns that were left out, as times and serial numbers are: ``table.column``.
        seconds: how long the trial has taken.
        leased: whether the handler works under a lease, without a transaction.
        of_load: whether it is of a bulk load.
    """

    handler: str
    points: tuple[PointResult, ...]
    ignored: tuple[str, ...]
    seconds: float
    leased: bool = False
    of_load: bool = False

    @property
    def failed(self) -> tuple[PointResult, ...]:
        """The points that lead to another state."""
        return tuple(point for point in self.points if point.differences)

    @property
    def ok(self) -> bool:
        """Whether all points lead to the same state."""
        return not self.failed

    def __str__(self) -> str:
        tried = [point for point in self.points if point.happened]
        if self.ok:
            lines = [f"{self.handler} is idempotent: {plural(len(tried), 'point')} lead to the same state"]
        else:
            failed = f"{len(self.failed)} of {plural(len(tried), 'point')} lead to another state"
            lines = [f"{self.handler} is not idempotent: {failed}"]
        for point in self.failed:
            lines.append(f"  {point.name}: {point.title}")
            lines += [f"      {difference}" for difference in point.differences]
        held = [point.name for point in tried if not point.differences]
        if not self.ok and held:
            lines.append(f"  the same state after: {', '.join(held)}")
        if len(tried) < len(self.points):
            untried = ", ".join(point.name for point in self.points if not point.happened)
            lines.append(f"  could not happen to it: {untried}")
        if self.ignored:
            lines.append(f"  left out, as they may differ: {', '.join(self.ignored)}")
        found = [difference for point in self.failed for difference in point.differences]
        if any(not difference.startswith(("effects", "not settled")) for difference in found):
            lines.append(SHARE_THE_CHUNK if self.of_load else SHARE_THE_TRANSACTION)
        if any(difference.startswith("effects") for difference in found):
            lines.append(LOOK_BEFORE if self.leased else SHARE_THE_ID)
        return "\n".join(lines)
