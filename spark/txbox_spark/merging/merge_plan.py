"""What the chunks of a run have in common, and what each of them counts: plain values, for executors have them, too."""

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import psycopg

from txbox.postgres.sql_files import SqlFile
from txbox_spark.merging.fresh_event import FRESH_EVENT
from txbox_spark.options import Apply, MergeOptions
from txbox_spark.reading.columns import EventColumn
from txbox_spark.rejects.rejects_table import RejectsTable
from txbox_spark.rejects.remarks import NO_REMARKS, RejectedRow, Remarks
from txbox_spark.runtime.explanations import describe_postgres_error
from txbox_spark.runtime.retries import is_transient


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


@dataclass(frozen=True, slots=True)
class FailedChunk:
    """A chunk that is not merged, and why: as plain values, so that it comes back from an executor."""

    chunk: int  # its number
    error: str  # why, in one line
    transient: bool  # another attempt may succeed: a lost connection, a deadlock

    @classmethod
    def of(cls, chunk: int, error: Exception) -> "FailedChunk":
        """Describe an error."""
        orig = getattr(error, "orig", None) or error
        line = describe_postgres_error(orig) if isinstance(orig, psycopg.Error) else " ".join(str(orig).split())
        # psycopg's own errors come from COPY, which SQLAlchemy does not see; without a code, the connection is gone.
        lost = isinstance(error, psycopg.OperationalError) and error.sqlstate is None
        transient = lost or is_transient(error)
        return cls(chunk, line, transient)


GROWTH = 4
"""A transaction takes at most so many times the chunks of the one before it."""


class MergeSizer:
    """Sizes the transactions of one task, or of the threads of one process.

    A transaction merges as many chunks as it can without holding its locks for longer than it should. Ids that a chunk
    has recorded, and rows that its effect has changed, are locked until its transaction ends; a worker that meets one
    of them waits. How long depends on the effect, on the inbox and on the machine, so it is measured. Chunks are small;
    a transaction takes one of them first, and then as many that follow each other as the time allows. Larger
    transactions cost less: fewer commits, and an effect that adds up changes a row once, not once for each chunk.
    """

    def __init__(self, lock_seconds: float, most: int) -> None:
        """Begin with one chunk.

        Args:
            lock_seconds: how long a transaction may hold its locks, about.
            most: chunks that a transaction takes, whatever its time.
        """
        self._lock_seconds = lock_seconds
        self._most = most
        self._chunks = 1
        self._lock = threading.Lock()

    @property
    def chunks(self) -> int:
        """How many chunks the next transaction takes, at most."""
        return self._chunks

    def merged(self, chunks: int, held_seconds: float) -> None:
        """Take account of a transaction that has merged so many chunks and has held its locks for so long."""
        fit = chunks * self._lock_seconds / max(held_seconds, 1e-6)
        with self._lock:
            self._chunks = max(1, min(int(fit), self._most, GROWTH * chunks))
