"""The writers of format txbox, for a DataFrame and for each batch of a stream.

For a DataFrame, Spark creates one writer, sends it to the tasks, and calls its commit or abort. For a batch of a
stream, it creates one writer for the tasks, and another one to commit. So the tasks return the run's id with their
pieces.
"""

import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from sqlalchemy.pool import NullPool

from txbox.postgres.engines import open_engine
from txbox_spark.loading.ledger import warn_of_new_subscriber
from txbox_spark.merging.merge_plan import MergePlan
from txbox_spark.report import OUTCOMES, BulkLoadReport
from txbox_spark.runtime.lazy_imports import StructType
from txbox_spark.source.arrow_events import ArrowEvents
from txbox_spark.source.piece_merger import PieceMerger
from txbox_spark.source.run_ledger import FRAME, STREAM, RunLedger
from txbox_spark.source.source_options import WriteOptions, explained

if TYPE_CHECKING:
    import pyarrow

ABORTED = (
    "the write has failed; what has committed stays. When the cause is fixed, write again: what has been applied is "
    "not applied again"
)


@dataclass(frozen=True, slots=True)
class MergedPieces(WriterCommitMessage):
    """What one attempt at a task has merged."""

    run_id: str
    numbers: tuple[int, ...]  # of its pieces in the ledger


class InboxWriter(DataSourceArrowWriter):
    """Writes a DataFrame, and applies every event once."""

    def __init__(self, options: WriteOptions, schema: StructType, source: str = FRAME) -> None:
        load = options.load
        events = ArrowEvents.of(schema, load.message_id, load.column_types or {}, load.fields)
        load.check_sent_at(events.columns)
        plan = MergePlan.of(
            load,
            run_id=secrets.token_hex(6),
            columns=events.columns,
            apply=load.statements,
            most_rejected=0 if options.fails_on_rejected else None,
        )
        url = load.database.render_as_string(hide_password=False)
        checkpoint = options.checkpoint if source == STREAM else None
        self._task = PieceMerger(url, plan, events, source, options.fails_on_rejected, checkpoint)
        self._ledger().check()

    def write(self, iterator: "Iterator[pyarrow.RecordBatch]") -> MergedPieces:
        return MergedPieces(self._task.plan.run_id, self._task.merge(iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Record that the write has succeeded, and log its report."""
        self._finish(self._ledger(), messages, "a DataFrame")

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:  # noqa: ARG002 - Spark gives it
        with explained("the failure cannot be recorded"):
            self._ledger().abort(ABORTED)

    def warn_of_new_subscriber(self) -> None:
        """Log a warning if the inbox has no id of the subscriber, but ids of others."""
        plan = self._task.plan
        warn_of_new_subscriber(self._ledger().engine, plan.schema, plan.prefix, plan.subscriber_id)

    def _ledger(self, run_id: str | None = None) -> RunLedger:
        plan = self._task.plan
        if run_id is not None:
            plan = replace(plan, run_id=run_id)
        engine = open_engine(self._task.url, poolclass=NullPool)
        return RunLedger(engine, plan, self._task.source, self._task.checkpoint)

    def _finish(self, ledger: RunLedger, messages: Sequence[WriterCommitMessage | None], what: str) -> None:
        with explained("every piece is merged, but the end of the write cannot be recorded"):
            report = ledger.finish([number for one in _merged(messages) for number in one.numbers])
        _log.log(logging.WARNING if report.rejected else logging.INFO, "%s", _line(report, what))


class InboxStreamWriter(InboxWriter, DataSourceStreamWriter):
    """Writes a stream, batch by batch. It is also an Arrow writer, because Spark 4.0 has none for streams."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema, STREAM)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int = 0) -> None:  # noqa: N803 - Spark's
        """Record that a batch has succeeded, and forget earlier batches."""
        for run_id in {one.run_id for one in _merged(messages)}:
            ledger = self._ledger(run_id)
            self._finish(ledger, messages, f"batch {batchId} of a stream")
            with explained("earlier batches cannot be forgotten"):
                ledger.forget_batches()

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int = 0) -> None:  # noqa: N803 - Spark's
        """Record that a batch has failed; a task whose piece failed has recorded why."""
        error = f"batch {batchId} of a stream: {ABORTED}"
        with explained("the failure cannot be recorded"):
            for run_id in {one.run_id for one in _merged(messages)}:
                self._ledger(run_id).abort(error)
            self._ledger().abort_batch(error)


def _merged(messages: Sequence[WriterCommitMessage | None]) -> list[MergedPieces]:
    return [one for one in messages if isinstance(one, MergedPieces)]


def _line(report: BulkLoadReport, what: str) -> str:
    """Return a report as one line; its counts add up."""
    counts = ", ".join(f"{getattr(report, name)} {name.replace('_', ' ')}" for name in OUTCOMES)
    sample = f": {'; '.join(report.rejected_sample)}" if report.rejected_sample else ""
    return f"run {report.run_id} of {what} for {report.subscriber_id}: {report.read} read, {counts}{sample}"


_log = logging.getLogger("txbox.spark")
