"""Does a task's part of a write: cuts its rows into pieces, and merges each piece in one transaction.

::

    Arrow batches ── ArrowEvents ── piece: sorted by id ──┬─ ledger: claim
                                    up to PIECE_ROWS      ├─ COPY into fresh_event, one of each id
                                                          ├─ merge_chunk: inbox, effect, ledger
                                                          └─ COMMIT

Spark chooses the partitions, and they are not ranges of ids, so pieces of two tasks may have the same events. The
primary key of the inbox decides. Nothing waits in a circle, because every piece locks in the same order:

1. its row in the ledger, which no other transaction wants: each piece of each attempt has its own number;
2. inbox rows, in the order of their ids, as all pieces, chunks and workers do;
3. the subscriber's effects, in ``merge_chunk``: a piece that has this lock needs no more inbox rows. If it has to start
   again, it releases both first.

Spark may run a task twice, in turn or at the same time. That is a redelivery: no piece is skipped because another
attempt has merged the same rows.
"""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import psycopg
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from txbox import TxboxError
from txbox.backoff import retry
from txbox.postgres.transactions import short_transaction
from txbox_spark.loading.loader import LOAD_ATTEMPTS, LOAD_BACKOFF
from txbox_spark.merging.chunk_merger import begin_chunk, merge_chunk
from txbox_spark.merging.chunk_sessions import open_sessions
from txbox_spark.merging.event_copier import copy_events
from txbox_spark.merging.fresh_event import FRESH_EVENT, create_fresh
from txbox_spark.merging.merge_plan import FailedChunk, MergePlan, MergeSizer
from txbox_spark.reading.columns import MESSAGE_ID
from txbox_spark.reading.event_rows import REJECTED
from txbox_spark.rejects.remarks import RejectedRow
from txbox_spark.runtime.lazy_imports import pyarrow
from txbox_spark.runtime.python_workers import freeze_modules
from txbox_spark.source.arrow_events import ArrowEvents
from txbox_spark.source.run_ledger import RunLedger, WriteFailed

FIRST_ROWS = 10_000
"""Rows of a task's first piece. Later pieces are larger, as long as they do not hold their locks too long."""

PIECE_ROWS = 200_000
"""How many rows a piece has at most."""

PIECE_BYTES = 32 << 20
"""About how many bytes of Arrow data a piece has at most; a task holds several copies of it."""

LOWEST_NUMBER = 1 << 24
"""The lowest number that a task chooses for a piece; the final numbers are lower."""


@dataclass(frozen=True, slots=True)
class PieceMerger:
    """Merges the rows of one task. It is sent to the executors, so it holds only values."""

    url: str = field(repr=False)  # the database's, as SQLAlchemy writes it
    plan: MergePlan
    events: ArrowEvents
    source: str  # in the ledger
    fails_on_rejected: bool  # whether a piece with rows that cannot be loaded ends the write instead of being merged
    checkpoint: str | None = None  # of a stream, if known

    def merge(self, batches: "Iterator[pyarrow.RecordBatch]") -> tuple[int, ...]:
        """Merge the rows of one attempt at a task, and return the numbers of its pieces in the ledger.

        Raises:
            WriteFailed: a piece cannot be merged. The pieces merged before it stay.
        """
        freeze_modules()
        engine = open_sessions(self.url, self.plan.apply)
        sizer = MergeSizer(self.plan.lock_seconds, PIECE_ROWS // FIRST_ROWS)
        ledger = RunLedger(engine, self.plan, self.source, self.checkpoint)
        numbers = []
        try:
            ledger.begin()
            for piece in self._pieces(batches, sizer):
                numbers.append(self._retried(engine, ledger, piece, sizer))
                ledger.begin()  # records that the run is being worked on
        finally:
            engine.dispose()
        return tuple(numbers)

    def _pieces(self, batches: "Iterator[pyarrow.RecordBatch]", sizer: MergeSizer) -> "Iterator[pyarrow.Table]":
        """Yield the rows in pieces, each sorted by message id, rejected rows last."""
        held: list[pyarrow.RecordBatch] = []
        rows = size = 0
        for batch in batches:
            for begin in range(0, batch.num_rows, FIRST_ROWS):
                # Copy the slice, because otherwise the rows before it would be converted, too.
                part = batch.slice(begin, FIRST_ROWS)
                if part.num_rows < batch.num_rows:
                    part = part.take(pyarrow.array(range(part.num_rows)))
                sent = self.events.batch(part)
                if held and (rows + sent.num_rows > sizer.chunks * FIRST_ROWS or size + sent.nbytes > PIECE_BYTES):
                    yield pyarrow.Table.from_batches(held).sort_by(MESSAGE_ID)
                    held, rows, size = [], 0, 0
                held.append(sent)
                rows += sent.num_rows
                size += sent.nbytes
        if held:
            yield pyarrow.Table.from_batches(held).sort_by(MESSAGE_ID)

    def _retried(self, engine: Engine, ledger: RunLedger, piece: "pyarrow.Table", sizer: MergeSizer) -> int:
        """Merge a piece, and retry after an outage, a deadlock or a lock timeout; return its number."""
        number = LOWEST_NUMBER + secrets.randbelow((1 << 31) - LOWEST_NUMBER)
        try:
            if self.fails_on_rejected:
                _refuse_rejected(piece)
            retry(
                lambda: self._merge(engine, ledger, number, piece, sizer),
                again=lambda error, _: isinstance(error, _ERRORS) and FailedChunk.of(number, error).transient,
                backoff=LOAD_BACKOFF,
                runs=LOAD_ATTEMPTS,
            )
        except WriteFailed:
            raise
        except _ERRORS as error:
            failed = FailedChunk.of(number, error)
            if not failed.transient:
                ledger.record_failure(failed.error)
            # Drop the cause, because it may quote values.
            raise WriteFailed(failed.error) from None
        return number

    def _merge(self, engine: Engine, ledger: RunLedger, number: int, piece: "pyarrow.Table", sizer: MergeSizer) -> None:
        with short_transaction(engine) as connection:
            claimed = begin_chunk(connection, self.plan, number)
            ledger.refuse_ended(connection)
            if not claimed:
                return  # this attempt has committed, but the answer was lost
            connection.exec_driver_sql(create_fresh(self.plan.columns))
            counts = copy_events(connection, self.plan, number, self.plan.columns, iter(piece.to_batches()))
            connection.exec_driver_sql(f"ANALYZE {FRESH_EVENT} ({MESSAGE_ID})")
            merged = merge_chunk(connection, self.plan, number, _id_range(piece), counts)
        held_seconds = time.monotonic() - merged.locked_at
        sizer.merged(max(1, piece.num_rows // FIRST_ROWS), held_seconds, beside_others=merged.beside_others)


def _id_range(piece: "pyarrow.Table") -> tuple[str, str | None]:
    """Return the first id of a piece, and the first possible id beyond its last; no id contains NUL."""
    ids = piece.column(MESSAGE_ID)
    valid = len(ids) - ids.null_count
    return (ids[0].as_py(), ids[valid - 1].as_py() + "\x01") if valid else ("", "")


def _refuse_rejected(piece: "pyarrow.Table") -> None:
    rejected = piece.column(REJECTED).drop_null()
    if len(rejected):
        reason = RejectedRow.from_json(rejected[0].as_py()).cause
        raise TxboxError(
            f"{len(rejected)} rows cannot be loaded ({reason}): mend them, or leave them out and count them with "
            "on_rejected=count"
        )


_ERRORS = (SQLAlchemyError, psycopg.Error, TxboxError)
