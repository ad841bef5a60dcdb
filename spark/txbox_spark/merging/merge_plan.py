"""What the chunks of a run share, and what each of them counts: plain values that can be sent to executors."""

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
    """What all chunks of a run share. It is sent to the executors."""

    run_id: str
    columns: tuple[EventColumn, ...]  # of ``fresh_event``
    apply: Apply
    most_chunks: int = 1  # per transaction
    rejects: RejectsTable | None = None  # keeps all rejected rows; if None, they are counted, and some are shown
    most_rejected: int | None = None  # in all chunks together; None means any number

    @classmethod
    def of(cls, options: MergeOptions, **of_run: Any) -> Self:
        """Return the plan of a run with these options; ``of_run`` has the other fields."""
        return cls(**{one.name: getattr(options, one.name) for one in fields(MergeOptions)}, **of_run)

    @property
    def sql(self) -> MergeStatements:
        return MergeStatements.load(self.schema, self.prefix)

    def keep_rejected(self, cursor: Any, chunk: int, rows: Sequence[RejectedRow]) -> Remarks:
        """Write a chunk's rejected rows to the rejects table, if there is one, and return the remarks on them."""
        if rows and self.rejects is not None:
            self.rejects.copy(cursor, self.run_id, chunk, rows)
        return Remarks.of(rows)

    @property
    def stalled(self) -> str:
        """``stalled_seconds`` as a Postgres interval."""
        return f"{max(1, round(self.stalled_seconds * 1000))}ms"


@dataclass(frozen=True, slots=True)
class ChunkCounts:
    read: int  # rows of the source
    rejected: int  # rows that cannot be loaded
    distinct: int  # distinct message ids of the other rows
    refused: int = 0  # those of the rejected rows that Postgres refuses
    remarks: Remarks = NO_REMARKS

    def __add__(self, other: "ChunkCounts") -> "ChunkCounts":
        return ChunkCounts(
            self.read + other.read,
            self.rejected + other.rejected,
            self.distinct + other.distinct,
            self.refused + other.refused,
            self.remarks + other.remarks,
        )

    def without(self, refused: int, remarks: Remarks) -> "ChunkCounts":
        """Return the counts with this many of the events moved to the refused ones."""
        return self + ChunkCounts(0, refused, -refused, refused, remarks)


@dataclass(frozen=True, slots=True)
class TriedIds:
    """What a chunk's ids showed, before its events are read."""

    counts: ChunkCounts
    parked: int  # events that wait as dead letters
    unprocessed: tuple[str, ...]  # ids that the inbox lacks, up to the limit asked for

    def as_json(self) -> str:
        """Return the object as text, to send it from an executor to the driver."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TriedIds":
        found = json.loads(text)
        counts = found["counts"]
        counts = ChunkCounts(**{**counts, "remarks": Remarks.from_json(counts["remarks"])})
        return cls(counts, found["parked"], tuple(found["unprocessed"]))


@dataclass(frozen=True, slots=True)
class FailedChunk:
    chunk: int
    error: str  # in one line
    transient: bool  # another attempt may succeed, such as after a lost connection or a deadlock

    @classmethod
    def of(cls, chunk: int, error: Exception) -> "FailedChunk":
        orig = getattr(error, "orig", None) or error
        line = describe_postgres_error(orig) if isinstance(orig, psycopg.Error) else " ".join(str(orig).split())
        # psycopg's own errors come from COPY, which SQLAlchemy does not see. Without a code, the connection is gone.
        lost = isinstance(error, psycopg.OperationalError) and error.sqlstate is None
        transient = lost or is_transient(error)
        return cls(chunk, line, transient)


GROWTH = 2
"""A transaction takes at most this many times as many chunks as the one before it."""

SMALL_TRANSACTIONS = 50
"""How many transactions take one chunk each after workers were last seen."""


class MergeSizer:
    """Sizes the transactions of one task, or of the threads of one process.

    A transaction merges as many chunks as it can without holding its locks too long. The ids that a chunk records, and
    the rows that its effect changes, are locked until its transaction ends, and a worker that needs one of them waits.
    How long depends on the effect, the inbox and the machine, so it is measured. Chunks are small: the first
    transaction takes one, and later ones take as many consecutive chunks as the time allows. Larger transactions cost
    less: there are fewer commits, and an effect that adds up changes a row once, instead of once per chunk.

    While workers are seen to record ids, each transaction takes one chunk: they wait for what it holds, and a message
    that waits holds up those of its batch.
    """

    def __init__(self, lock_seconds: float, most: int) -> None:
        """Begin with one chunk.

        Args:
            lock_seconds: about how long a transaction may hold its locks.
            most: how many chunks a transaction takes at most, however fast it is.
        """
        self._lock_seconds = lock_seconds
        self._most = most
        self._chunks = 1
        self._small = 0  # transactions that are still to take one chunk each
        self._lock = threading.Lock()

    @property
    def chunks(self) -> int:
        return self._chunks

    def merged(self, chunks: int, held_seconds: float, *, beside_others: bool) -> None:
        """Adjust the size after a transaction that merged this many chunks and held its locks this long.

        ``beside_others``: whether workers were recording ids when it ended.
        """
        fit = chunks * self._lock_seconds / max(held_seconds, 1e-6)
        with self._lock:
            self._small = SMALL_TRANSACTIONS if beside_others else max(0, self._small - 1)
            most = 1 if self._small else self._most
            self._chunks = max(1, min(int(fit), most, GROWTH * chunks))
