"""The report of a bulk load, and its progress."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from txbox_spark.rejects.remarks import RejectedCause

OUTCOMES = ("rejected", "duplicate_in_source", "already_processed", "parked", "expired", "applied")
"""What may become of a row: the names of counts that add up to the rows that were read."""


@dataclass(frozen=True, slots=True)
class BulkLoadReport:
    """The result of a bulk load over all its attempts; each row of the source is counted once.

    ``read`` is the sum of ``rejected``, ``duplicate_in_source``, ``already_processed``, ``parked``,
    ``expired`` and ``applied``.

    Attributes:
        run_id: the run in the ledger.
        subscriber_id: the subscriber that the events were applied for.
        source: what was loaded.
        writer: "copy" or "jdbc".
        writer_reason: why that writer was chosen.
        attempts: how often the run was begun.
        chunks: how many transactions applied the events.
        read: rows of the source.
        rejected: rows that cannot be loaded.
        rejected_sample: some of those, each with its cause.
        duplicate_in_source: rows whose id another row of the source has.
        already_processed: events that were processed before.
        applied: events that were first, and whose effect has committed.
        seconds: how long this attempt took, by stage.
        parked: events that wait as dead letters, and are processed when they are redriven.
        expired: events that were sent before the subscriber's horizon. The inbox has forgotten whether they were
            processed, so they were not applied.
        rejected_causes: why rows were rejected, the cause with the most rows first.
        rejected_to: where all rejected rows are kept; None if no place was given.
        differing: ids with several rows that differ. ``keep`` decided which row was taken.
        differing_sample: some of those ids.
    """

    run_id: str
    subscriber_id: str
    source: str
    writer: str
    writer_reason: str
    attempts: int
    chunks: int
    read: int
    rejected: int
    rejected_sample: tuple[str, ...]
    duplicate_in_source: int
    already_processed: int
    applied: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    parked: int = 0
    expired: int = 0
    rejected_causes: tuple[RejectedCause, ...] = ()
    rejected_to: str | None = None
    differing: int = 0
    differing_sample: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict of plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MergePace:
    """How fast a merge has been lately, not counting earlier attempts.

    Attributes:
        rows_per_second: rows that were read and merged.
        chunks_per_minute: chunks that were merged.
        seconds_left: an estimate of the time until the merge ends.
    """

    rows_per_second: float
    chunks_per_minute: float
    seconds_left: float


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a bulk load has come.

    Attributes:
        run_id: the run in the ledger; None before a run exists.
        stage: "survey", "staging" or "merge"; in a dry run, "survey" or "ids".
        done: tasks or chunks that are done.
        total: tasks or chunks of the stage; 0 until Spark has planned it.
        applied: events applied so far, by all attempts.
        rows: rows in the chunks merged so far, by all attempts.
        total_rows: rows of all chunks.
        pace: the pace of the merge; None until it is known.
    """

    run_id: str | None
    stage: str
    done: int
    total: int
    applied: int = 0
    rows: int = 0
    total_rows: int = 0
    pace: MergePace | None = None


OnProgress = Callable[[JobProgress], object]
"""Called about twice a second, from its own thread."""
