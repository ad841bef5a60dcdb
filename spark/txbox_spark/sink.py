"""Applies Structured Streaming queries through the inbox: each micro-batch is a bulk load.

::

    stream.writeStream.foreachBatch(inbox_sink(url=…, …)).option("checkpointLocation", …).start()

    batch n ──▶ bulk load "stream QUERY batch n" ──▶ on_batch ──▶ Spark commits n to the checkpoint
                          │
                          └── killed, or failed: when the query starts again, Spark gives the same rows
                              again. If it cuts the same batches, their run is resumed. If not, the inbox
                              rejects what was applied.

foreachBatch delivers each batch at least once. With the inbox, each event is applied once, whatever the batch's number
and bounds: a query may continue from its checkpoint, from an older one, or start again without any.

The ledger holds the batch that is being loaded, and forgets it once it is loaded. A batch that was killed or that
failed stays, with its error, until the same query begins a batch again. If that is the same batch, with the same ids,
its run is resumed: it skips the chunks that are done, whose rejected rows are kept. If the query never starts again,
the batch stays until a sink of the same subscriber begins one after ``ABANDONED_SECONDS``.

To stop a query within a batch, Spark interrupts the batch's calls to Java. The batch ends with an error, is not
committed to the checkpoint, and comes again when the query restarts. Spark recognizes such an error by its text, with a
pattern that overflows the stack if the text is long; and py4j logs every error that it passes on. So the sink raises a
short error of its own, with the text that Spark expects, and keeps py4j from logging it.
"""

import logging
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Unpack

from sqlalchemy import NullPool

from txbox import InvalidConfiguration, TxboxError
from txbox.instrumentation import Hook
from txbox.postgres.engines import open_engine
from txbox_spark.bulk_load import emit_loaded, load_events
from txbox_spark.loading.context import BulkLoadFailed
from txbox_spark.loading.ledger import LoadLedger, RunNotFound
from txbox_spark.loading.writer import FEW, WriterChoice
from txbox_spark.options import AUTO, LoadOptions, ValidLoadOptions
from txbox_spark.reading.sources import EventSource
from txbox_spark.report import BulkLoadReport, OnProgress
from txbox_spark.runtime.lazy_imports import DataFrame, spark_errors
from txbox_spark.runtime.session import refuse_connect

OnBatch = Callable[[int, BulkLoadReport], object]
"""Called with a batch's number and report, after the batch is loaded and before Spark commits it."""


class BatchFailed(TxboxError):
    """A batch of a stream cannot be loaded, so the query ends. Chunks that have committed stay.

    Attributes:
        batch_id: Spark's number of the batch.
        run_id: the run in the ledger.
    """

    def __init__(self, batch_id: int, run_id: str, why: str, *, done: int, chunks: int) -> None:
        self.batch_id = batch_id
        self.run_id = run_id
        super().__init__(
            f"batch {batch_id} of the stream: {why} ({done} of {chunks} chunks are merged, and of the others nothing "
            "is committed; when the cause is fixed, start the query again with the same checkpoint)"
        )


class BatchInterrupted(TxboxError):
    """Spark interrupted a batch because its query was stopped."""

    def __init__(self, batch_id: int) -> None:
        # Spark matches this text with StreamExecution.PROXY_ERROR.
        super().__init__(
            f"batch {batch_id} of the stream is interrupted, and comes again when the query is started again; "
            "py4j.protocol.Py4JJavaError: An error occurred while calling foreachBatch: java.lang.InterruptedException"
        )


def inbox_sink(
    *,
    on_batch: OnBatch | None = None,
    on_progress: OnProgress | None = None,
    hooks: Iterable[Hook] = (),
    **options: Unpack[LoadOptions],
) -> Callable[[DataFrame, int], None]:
    """Return a function for ``DataStreamWriter.foreachBatch`` that applies every event of the stream once.

    Rejected rows do not stop the query. They are counted, logged as a warning with a sample, and in the report.

    Spark computes each batch twice, the first time only for its ids. That is cheap for files. If it is expensive (a
    wide stateful query, a source that throttles), or yields other rows the second time, persist the batch::

        sink = inbox_sink(...)

        def keep(batch, batch_id):
            batch.persist()
            try:
                sink(batch, batch_id)
            finally:
                batch.unpersist()

    Args:
        on_batch: called with the number and report of each batch that has rows. After a restart it may be called with
            the same number again. If it raises, the query ends.
        on_progress: called with the progress of each batch, from its own thread.
        hooks: receive ``txbox.instrumentation.BulkLoaded`` after each batch that has rows.
        options: those of ``txbox_spark.options.LoadOptions``; ``url``, ``subscriber_id``, ``message_id`` and ``apply``
            are required.

    Returns:
        The function; it raises ``BatchFailed`` if a batch cannot be loaded, which ends the query.

    Raises:
        InvalidConfiguration: an argument is invalid.
    """
    valid = ValidLoadOptions.given_to("inbox_sink", options)
    logging.getLogger("py4j.clientserver").addFilter(_is_not_interruption)
    ledger = LoadLedger(open_engine(valid.database, poolclass=NullPool), valid.schema, valid.prefix)
    hooks = tuple(hooks)
    unnamed = str(uuid.uuid4())
    chosen = WriterChoice(valid.writer, "asked for")
    clean: str | None = None

    def sink(batch: DataFrame, batch_id: int) -> None:
        try:
            load(batch, batch_id)
        except Exception as error:
            if not _is_interruption(error):
                raise
        else:
            return
        raise BatchInterrupted(batch_id)

    def load(batch: DataFrame, batch_id: int) -> None:
        nonlocal chosen, clean
        refuse_connect(batch, "inbox_sink", 'write the stream with format txbox: stream.writeStream.format("txbox")')
        # Spark sets this in the query's thread. It stays the same after a restart from the same checkpoint.
        query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId") or unnamed
        source = f"stream {query} batch {batch_id}"
        begun = None
        if clean != query:
            ledger.check()
            begun = ledger.run_of_source(valid.subscriber_id, source)
            # A query runs one batch at a time, so nobody is working on its older batches.
            own = f"^stream {re.escape(query)} batch [0-9]+$"
            forgotten = ledger.forget_abandoned(valid.subscriber_id, own, _ANY_BATCH, valid.abandoned_seconds, begun)
            for abandoned in forgotten:
                _log.info("an abandoned batch of a stream is forgotten: bulk load %s", abandoned)
        clean = None
        try:
            report = None if begun is None else resumed(batch, source, begun)
            if report is None:
                begun = None
                report = load_events(batch, valid, chosen.writer, EventSource(source, b""), None, on_progress)
        except BulkLoadFailed as error:
            failed = BatchFailed(batch_id, error.run_id, error.why, done=error.done, chunks=error.chunks)
            raise failed from error
        # The writer of a few events, or of an earlier attempt, says nothing about the executors.
        if chosen.writer == AUTO and begun is None and report.writer_reason != FEW.reason:
            chosen = WriterChoice(report.writer, report.writer_reason)
        ledger.forget(report.run_id)
        clean = query
        if report.rejected:
            sample = "; ".join(report.rejected_sample)
            _log.warning("%s: %d of %d rows rejected: %s", report.source, report.rejected, report.read, sample)
        if report.read:
            emit_loaded(hooks, report, f"stream {query}", batch_id)
        if report.read and on_batch is not None:
            reason = report.writer_reason if chosen.writer == AUTO else chosen.reason
            on_batch(batch_id, replace(report, writer_reason=reason))

    def resumed(batch: DataFrame, source: str, run_id: str) -> BulkLoadReport | None:
        """Finish the run of an earlier attempt at the batch; forget it and return None if it cannot be resumed."""
        try:
            return load_events(batch, valid, chosen.writer, EventSource(source, b""), run_id, on_progress)
        except BulkLoadFailed as error:
            if error.resumable:
                raise
        except (InvalidConfiguration, RunNotFound):
            pass
        _log.info("%s: bulk load %s cannot be resumed, and another one begins", source, run_id)
        ledger.forget(run_id)
        return None

    return sink


def _is_interruption(error: BaseException | None) -> bool:
    """Return whether a Java interruption is among an error's causes."""
    while error is not None:
        if isinstance(error, spark_errors()) and any(one in str(error) for one in _INTERRUPTIONS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_not_interruption(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], BatchInterrupted))


_INTERRUPTIONS = (
    "java.lang.InterruptedException",
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
)
_ANY_BATCH = "^stream [0-9a-f-]{36} batch [0-9]+$"

_log = logging.getLogger("txbox.spark")
