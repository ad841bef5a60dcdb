"""What the chunks of a run have in common, and what each of them counts: plain values, for executors have them, too."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from txbox.postgres.sql_files import SqlFile
from txbox_spark.merging.fresh_event import FRESH_EVENT
from txbox_spark.options import Apply, MergeOptions
from txbox_spark.reading.columns import EventColumn
from txbox_spark.rejects.rejects_table import RejectsTable
from txbox_spark.rejects.remarks import NO_REMARKS, RejectedRow, Remarks


class MergeStatements(SqlFile, file="chunk_merger.sql", constants={"fresh_event": FRESH_EVENT}):
    """The statements of chunk_merger.sql, for the tables of one schema, under one prefix."""

    prepare_session: str
    claim_chunk: str
    waiting_copies: str
    end_session: str
    settle_chunk: str
    find_processed: str
    processed_in_range: str
    drop_processed: str
    unprocessed: str
    avoid_hashes: str
    any_horizon: str
    behind_horizon: str
    record: str
    create_recorded: str
    record_raced: str
    drop_unrecorded: str
    analyze_fresh: str
    lock_effects: str
    effects_holder: str
    restore_settings: str
    any_parked: str
    parked_events: str
    rejected_so_far: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan(MergeOptions):
    """What all chunks of a run have in common. It is sent to the executors."""

    run_id: str  # of the ledger
    columns: tuple[EventColumn, ...]  # of ``fresh_event``
    apply: Apply  # the effect
    most_chunks: int = 1  # how many chunks one transaction merges at most
    rejects: RejectsTable | None = None  # where all rejected rows are kept; None: they are counted, and some are shown
    most_rejected: int | None = None  # how many rows of all chunks may be rejected; None: any number

    @classmethod
    def of(cls, options: MergeOptions, **of_run: Any) -> Self:
        """Return the plan of a run with these options; ``of_run`` are the other fields."""
        return cls(**{one.name: getattr(options, one.name) for one in fields(MergeOptions)}, **of_run)

    @property
    def sql(self) -> MergeStatements:
        """The statements."""
        return MergeStatements.load(self.schema, self.prefix)

    def keep_rejected(self, cursor: Any, chunk: int, rows: Sequence[RejectedRow]) -> Remarks:
        """Keep rejected rows of a chunk where they are to be kept, and return the remarks of them."""
        if rows and self.rejects is not None:
            self.rejects.copy(cursor, self.run_id, chunk, rows)
        return Remarks.of(rows)

    @property
    def stalled(self) -> str:
        """``stalled_seconds``, for Postgres."""
        return f"{max(1, round(self.stalled_seconds * 1000))}ms"


@dataclass(frozen=True, slots=True)
class ChunkCounts:
    """The rows of a chunk."""

    read: int  # rows of the source
    rejected: int  # rows that cannot be loaded
    distinct: int  # different message ids of the others
    refused: int = 0  # of the rejected rows, those that Postgres does not take
    remarks: Remarks = NO_REMARKS  # of the rows

    def __add__(self, other: "ChunkCounts") -> "ChunkCounts":
        """Return the counts of both."""
        return ChunkCounts(
            self.read + other.read,
            self.rejected + other.rejected,
            self.distinct + other.distinct,
            self.refused + other.refused,
            self.remarks + other.remarks,
        )

    def without(self, refused: int, remarks: Remarks) -> "ChunkCounts":
        """Return the counts where so many of the events are refused."""
        return self + ChunkCounts(0, refused, -refused, refused, remarks)


@dataclass(frozen=True, slots=True)
class TriedIds:
    """What the ids of a chunk have told, before its events are read."""

    counts: ChunkCounts
    parked: int  # events that wait as dead letters
    unprocessed: tuple[str, ...]  # the ids that are not in the inbox, or as many of them as were asked for

    def as_json(self) -> str:
        """Return it as text, for its way from an executor to the driver."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TriedIds":
        """Return what ``as_json`` was made of."""
        found = json.loads(text)
        counts = found["counts"]
        counts = ChunkCounts(**{**counts, "remarks": Remarks.from_json(counts["remarks"])})
        return cls(counts, found["parked"], tuple(found["unprocessed"]))
