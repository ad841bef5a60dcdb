"""Keeps the run of one write in the ledger of bulk loads.

::

    begin (each task) ──▶ pieces, by tasks that Spark may run twice ──┬──▶ finish (commit)
                                                                      └──▶ abort

If a task runs again, its pieces are new rows of the ledger, and go through the inbox like any redelivery. At the end,
Spark says which attempts count. Of the other attempts, only the events that they applied count: they are added to the
pieces that count, for which these events were already processed. So a run's counts add up, whatever ran twice.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, Engine

from txbox import TxboxError
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import short_transaction
from txbox.status.bulk_loads import BY_FORMAT, run_lock
from txbox_spark.loading.ledger import LedgerStatements, LoadLedger
from txbox_spark.merging.merge_plan import MergePlan
from txbox_spark.options import ABANDONED_SECONDS
from txbox_spark.rejects.remarks import NO_REMARKS, Remarks
from txbox_spark.report import BulkLoadReport
from txbox_spark.runtime.retries import retry_outages

FRAME, STREAM = f"a DataFrame, {BY_FORMAT}", f"a stream, {BY_FORMAT}"
"""The sources of such runs in the ledger."""


def digest_of(checkpoint: str | None) -> bytes:
    """Return the digest of a query's runs, by its checkpoint; for None, that of all other writes.

    No bulk load has such a digest, so none can resume such a run.
    """
    name = b"format txbox" if checkpoint is None else b"format txbox\0" + checkpoint.encode()
    return hashlib.sha256(name).digest()


class WriteFailed(TxboxError):
    """A write of format txbox failed. What has committed stays; writing again applies the rest."""


class RunStatements(SqlFile, file="run_ledger.sql"):
    begin_run: str
    ended: str
    abort_run: str
    abort_batch: str
    lock_run: str
    drop_lost_pieces: str
    settle_pieces: str
    finish_run: str
    forget_batches: str


@dataclass(frozen=True, slots=True)
class RunLedger:
    """The run of one write. Every method except ``refuse_ended`` is its own transaction, and may run twice."""

    engine: Engine
    plan: MergePlan
    source: str  # FRAME or STREAM
    checkpoint: str | None = None  # of a stream, if known

    @property
    def _sql(self) -> RunStatements:
        return RunStatements.load(self.plan.schema, self.plan.prefix)

    @property
    def _loads(self) -> LoadLedger:
        return LoadLedger(self.engine, self.plan.schema, self.plan.prefix)

    def check(self) -> None:
        """Raise ``SchemaMissing`` unless the tables of the inbox and the ledger exist."""
        self._loads.check()

    def begin(self) -> None:
        """Begin the run, or record that it is being worked on."""
        plan = self.plan
        digest = digest_of(self.checkpoint)
        values = {"run_id": plan.run_id, "subscriber_id": plan.subscriber_id, "source": self.source, "digest": digest}
        self._execute(self._sql.begin_run, values)

    def refuse_ended(self, connection: Connection) -> None:
        """Raise ``WriteFailed`` if the run has ended; the connection's transaction must have the run's lock."""
        ended = connection.exec_driver_sql(self._sql.ended, {"run_id": self.plan.run_id}).first()
        if ended is not None and ended.error is not None:
            raise WriteFailed(ended.error)
        if ended is None or ended.finished:
            raise WriteFailed("the write has ended, and this task is of no use any more")

    def record_failure(self, error: str) -> None:
        """Record why a piece cannot be merged, which also ends the other tasks."""
        self._loads.record_failure(self.plan.run_id, error)

    def abort(self, error: str) -> None:
        self.begin()
        self._execute(self._sql.abort_run, {"run_id": self.plan.run_id, "error": error})

    def abort_batch(self, error: str) -> None:
        """Record that the stream's open batch has failed, even if none of its tasks returned the run's id.

        The batch is found by the checkpoint, because a query runs one batch at a time.
        """
        if self.checkpoint is not None:
            query = {"subscriber_id": self.plan.subscriber_id, "digest": digest_of(self.checkpoint)}
            self._execute(self._sql.abort_batch, {**query, "error": error})

    def finish(self, pieces: Collection[int]) -> BulkLoadReport:
        """Record that the write has succeeded with these pieces, and return the report."""
        self.begin()
        self._settle(pieces)
        plan, totals = self.plan, self._loads.totals(self.plan.run_id)
        run = self._loads.read(plan.run_id)
        loadable = totals.read - totals.rejected
        return BulkLoadReport(
            run_id=plan.run_id,
            subscriber_id=plan.subscriber_id,
            source=self.source,
            writer=run.writer,
            writer_reason="a data source",
            attempts=run.attempt,
            chunks=totals.chunks,
            read=totals.read,
            rejected=totals.rejected,
            rejected_sample=run.remarks.sample,
            rejected_causes=run.remarks.causes,
            differing=run.remarks.differing,
            differing_sample=run.remarks.differing_sample,
            duplicate_in_source=loadable - totals.already_processed - totals.applied - totals.expired,
            already_processed=totals.already_processed - totals.parked,
            applied=totals.applied,
            parked=totals.parked,
            expired=totals.expired,
        )

    def forget_batches(self) -> None:
        """Forget the other batches of the subscriber's streams, unless they may still be worked on.

        Open batches of the same query are forgotten, too, because a query runs one batch at a time.
        """
        values = {
            "run_id": self.plan.run_id,
            "subscriber_id": self.plan.subscriber_id,
            "source": self.source,
            "digest": None if self.checkpoint is None else digest_of(self.checkpoint),
            "abandoned_seconds": ABANDONED_SECONDS,
        }
        self._execute(self._sql.forget_batches, values)

    @retry_outages
    def _settle(self, pieces: Collection[int]) -> None:
        run = {"run_id": self.plan.run_id}
        with short_transaction(self.engine) as connection:
            locked = {"stalled": self.plan.stalled, "run_lock": run_lock(self.plan.run_id)}
            connection.exec_driver_sql(self._sql.lock_run, locked)
            if connection.exec_driver_sql(self._sql.ended, run).one().finished:
                return  # an earlier COMMIT succeeded, but its answer was lost
            lost = connection.exec_driver_sql(self._sql.drop_lost_pieces, {**run, "pieces": list(pieces)}).scalar_one()
            connection.exec_driver_sql(self._sql.settle_pieces, {**run, "lost": lost})
            remarks = LedgerStatements.load(self.plan.schema, self.plan.prefix).remarks
            found = connection.exec_driver_sql(remarks, run).scalars()
            shown = sum(map(Remarks.from_json, found), NO_REMARKS)
            connection.exec_driver_sql(self._sql.finish_run, {**run, "rejected_sample": json.dumps(shown.as_json())})

    @retry_outages
    def _execute(self, statement: str, values: Mapping[str, object]) -> None:
        with short_transaction(self.engine) as connection:
            connection.exec_driver_sql(statement, values)
