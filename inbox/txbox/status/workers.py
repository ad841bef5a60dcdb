"""Which workers are at work, by their own reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection

from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import check_table

STALE_SECONDS = 10.0
"""A worker reports every 3 seconds; one that is this late does not run, or cannot reach the database."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker, by its own report.

    Attributes:
        worker_id: new at each start.
        subscriber_id: for whom it works.
        source: where its messages come from.
        source_retention_seconds: how long its source keeps a message; None if that is not known.
        host: where its process runs.
        pid: of its process.
        version: of txbox.
        state: ``working``; ``paused``, and finishing what it has in hand; or ``drained``: paused, with nothing in hand.
        outcomes: deliveries by outcome since it was created.
        per_second: the same per second, between its last two reports.
        deadlocks: handlers' transactions that were rolled back because of a deadlock.
        retries: transactions that were run again, including after deadlocks.
        started_at: when it first reported.
        last_batch_at: when it last received something, by the database's clock; None if it never did.
        oldest_sent_at: when the oldest message of that batch was sent; None if that is not known.
        seen_seconds_ago: since its last report.
        stale: whether that report is late; see ``STALE_SECONDS``.
    """

    worker_id: str
    subscriber_id: str
    source: str
    source_retention_seconds: float | None
    host: str
    pid: int
    version: str
    state: str
    outcomes: Mapping[str, int]
    per_second: Mapping[str, float]
    deadlocks: int
    retries: int
    started_at: datetime
    last_batch_at: datetime | None
    oldest_sent_at: datetime | None
    seen_seconds_ago: float
    stale: bool


class WorkerStatements(SqlFile, file="workers.sql"):
    workers: str


def read_workers(connection: Connection, *, schema: str | None = None, prefix: str = "") -> tuple[WorkerStatus, ...]:
    """Return the workers that have not signed off; raise ``SchemaMissing`` if our tables do not exist."""
    sql = WorkerStatements.load(schema, prefix)
    check_table(connection, sql.tables.worker_report)
    rows = connection.exec_driver_sql(sql.workers, {"stale_after": timedelta(seconds=STALE_SECONDS)}).mappings()
    return tuple(WorkerStatus(**with_moments(row, "started_at", "last_batch_at", "oldest_sent_at")) for row in rows)
