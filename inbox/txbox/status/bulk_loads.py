"""Runs of bulk loads: how far they are, by the ledger; removing them; and which of them wait for a lock, and for whom.

Each transaction of a bulk load also takes a shared advisory lock whose number is the run's. It blocks no session. It
lets any session, whatever its role may see, find in ``pg_locks`` to which run a server process belongs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Engine

from txbox.postgres.drivers.own_adapters import own_cursors
from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import check_table, short_transaction
from txbox.status.staging_tables import StagingCatalogue

SILENT_SECONDS = 60.0
"""A load at work has a heartbeat every ten seconds; without one for this long, it has stopped."""

SHOWN_REJECTED = 10
"""Most rejected rows shown of one load."""

_TAG = 0x7478
"""The upper 16 bits of the number of a run's lock; the run is the other 48."""


class LoadState(StrEnum):
    RUNNING = "running"  # its heartbeat is recent
    STOPPED = "stopped"  # it has no heartbeat and no error: interrupted, or killed
    FAILED = "failed"  # its last attempt ended with an error
    FINISHED = "finished"


BY_FORMAT = "by format txbox"
"""How the source of a write of Spark's format txbox ends. No command resumes such a load: it is written again."""


@dataclass(frozen=True, slots=True)
class LoadCounts:
    """The rows of a load, each counted once: ``read``, if known, is the sum of the others."""

    read: int | None  # None until a write of format txbox, which is counted only at its end, has finished
    rejected: int
    duplicate_in_source: int
    already_processed: int
    parked: int
    expired: int
    applied: int
    left: int | None  # rows of chunks that are not merged yet; None as for ``read``


@dataclass(frozen=True, slots=True)
class BulkLoad:
    """One run of the ledger.

    Attributes:
        run_id: 12 hexadecimal digits.
        subscriber_id: the subscriber for which the events are applied.
        source: what is loaded, in words.
        state: the state of the run.
        writer: ``copy`` or ``jdbc``.
        chunks: how many chunks there are.
        merged: how many of them are merged.
        attempts: how often it was begun.
        staging_table: the complete staging table, if there is one.
        error: why the last attempt ended; None if it has not failed.
        started_at: when it was begun.
        heartbeat_at: when it was last worked on.
        finished_at: when its last chunk was merged; None if some are left.
        counts: its rows.
    """

    run_id: str
    subscriber_id: str
    source: str
    state: LoadState
    writer: str
    chunks: int
    merged: int
    attempts: int
    staging_table: str | None
    error: str | None
    started_at: datetime
    heartbeat_at: datetime
    finished_at: datetime | None
    counts: LoadCounts

    @property
    def is_write(self) -> bool:
        """Whether it is a write of Spark's format txbox, which is never resumed."""
        return self.source.endswith(BY_FORMAT)


class BulkLoadStatements(SqlFile, file="bulk_loads.sql"):
    loads: str
    rejected_sample: str
    run_ids: str
    finished_before: str
    forget: str


class BulkLoads:
    """The runs in the ledger of one database."""

    def __init__(self, engine: Engine, *, schema: str | None = None, prefix: str = "") -> None:
        self._engine = engine
        self._sql = BulkLoadStatements.load(schema, prefix)
        self._staging = StagingCatalogue(schema, prefix)

    def check(self) -> None:
        """Raise ``SchemaMissing`` if there is no ledger."""
        with self._engine.connect() as connection, own_cursors(connection):
            check_table(connection, self._sql.tables.bulk_load)
            check_table(connection, self._sql.tables.bulk_load_chunk)

    def list(
        self, *, subscriber_id: str | None = None, state: LoadState | None = None, limit: int = 100
    ) -> Sequence[BulkLoad]:
        """Return runs, the last begun first.

        Args:
            subscriber_id: only those of this subscriber.
            state: only those in this state.
            limit: how many at most.
        """
        return [_load(row) for row in self._rows(subscriber_id=subscriber_id, state=state, limit=limit)]

    def get(self, run_id: str) -> tuple[BulkLoad, tuple[str, ...]] | None:
        """Return a run and some of its rejected rows, each with the reason; None if there is no such run."""
        rows = self._rows(run_id=run_id)
        if not rows:
            return None
        sample = rows[0]["rejected_sample"]
        if rows[0]["rows_rejected"] is None:  # only the chunks know
            asked = {"run_id": run_id, "limit": SHOWN_REJECTED}
            with short_transaction(self._engine) as connection:
                sample = connection.exec_driver_sql(self._sql.rejected_sample, asked).scalars().all()
        return _load(rows[0]), tuple(sample)

    def run_ids(self, start: str) -> Sequence[str]:
        """Return the ids that begin with ``start``."""
        with short_transaction(self._engine) as connection:
            return connection.exec_driver_sql(self._sql.run_ids, {"start": start}).scalars().all()

    def finished_before(self, moment: datetime) -> Sequence[str]:
        with short_transaction(self._engine) as connection:
            return connection.exec_driver_sql(self._sql.finished_before, {"moment": moment}).scalars().all()

    def forget(self, run_id: str, *, force: bool = False) -> bool:
        """Delete a run with its chunks and staging tables; return whether it was deleted.

        What it has applied stays, and so do the ids in the inbox. It cannot be resumed any more; a new load of the same
        events finds the ids and applies the rest.

        Args:
            run_id: of the run.
            force: delete it even if it is being worked on. Then its process fails, and what it has committed stays.
        """
        values = {"run_id": run_id, "is_forced": force, "silent_seconds": SILENT_SECONDS}
        with short_transaction(self._engine) as connection:
            gone = connection.exec_driver_sql(self._sql.forget, values).first() is not None
            tables = self._staging.of_run(connection, run_id) if gone else []
        for table in tables:  # their run is in no ledger now: `txbox maintain` finds what is not dropped here
            self._staging.drop(self._engine, table)
        return gone

    def _rows(
        self,
        *,
        run_id: str | None = None,
        subscriber_id: str | None = None,
        state: LoadState | None = None,
        limit: int = 1,
    ) -> Sequence[dict[str, Any]]:
        values = {
            "run_id": run_id,
            "subscriber_id": subscriber_id,
            "state": state,
            "silent_seconds": SILENT_SECONDS,
            "limit": limit,
        }
        with short_transaction(self._engine) as connection:
            rows = connection.exec_driver_sql(self._sql.loads, values).mappings()
            return [with_moments(row, "started_at", "heartbeat_at", "finished_at") for row in rows]


class BlockedLoadStatements(SqlFile, file="blocked_loads.sql"):
    blocked_loads: str


@dataclass(frozen=True, slots=True)
class BlockedLoad:
    """A transaction of a bulk load that waits for a lock.

    Attributes:
        run_id: of the load.
        pid: its server process.
        seconds: how long it has waited; None if this role may not see that.
        blocker_pid: the server process it waits for; 0 is a prepared transaction.
        blocker_run_id: the bulk load of the blocker; None if it is something else.
        blocker_owner: the blocker's user; None if there is none.
        blocker_state: state of the blocker's session, such as ``idle in transaction``; None if this role may not see
            it.
        blocker_seconds: how long the blocker's transaction has been open; None if this role may not see that.
    """

    run_id: str
    pid: int
    seconds: float | None
    blocker_pid: int
    blocker_run_id: str | None
    blocker_owner: str | None
    blocker_state: str | None
    blocker_seconds: float | None

    @property
    def usual(self) -> bool:
        """Whether it only waits its turn: another chunk of the same run is applying its events."""
        return self.run_id == self.blocker_run_id and not (self.blocker_state or "").startswith("idle")

    def __str__(self) -> str:
        facts = [
            f"bulk load {self.blocker_run_id}" if self.blocker_run_id else None,
            f"of {self.blocker_owner}" if self.blocker_owner else None,
            self.blocker_state,
            None if self.blocker_seconds is None else f"its transaction open for {self.blocker_seconds:.0f} s",
        ]
        details = ", ".join(one for one in facts if one)
        waited = "" if self.seconds is None else f" for {self.seconds:.0f} s"
        blocker = f"server process {self.blocker_pid}" if self.blocker_pid else "a prepared transaction"
        remedy = (
            f"to end it: SELECT pg_terminate_backend({self.blocker_pid})"
            if self.blocker_pid
            else "to end it: COMMIT PREPARED or ROLLBACK PREPARED (pg_prepared_xacts has its name)"
        )
        return (
            f"bulk load {self.run_id} (server process {self.pid}) has waited{waited} for {blocker}"
            f"{f' ({details})' if details else ''}; {remedy}"
        )


def run_lock(run_id: str) -> int:
    """Return the number of the lock that the transactions of a run (12 hexadecimal digits) share."""
    return _TAG << 48 | int(run_id, 16)


def find_blocked_loads(connection: Connection, run_id: str | None = None) -> tuple[BlockedLoad, ...]:
    """Return the bulk loads' transactions in this database that wait for a lock, once per transaction they wait for.

    ``run_id``: only those of this load; None: of all loads.
    """
    statement = BlockedLoadStatements.load().blocked_loads
    rows = connection.exec_driver_sql(statement, {"tag": _TAG, "run_id": run_id}).mappings()
    return tuple(BlockedLoad(**row) for row in rows)


def _load(row: dict[str, Any]) -> BulkLoad:
    plain = {one.name: row[one.name] for one in fields(BulkLoad) if one.name not in ("state", "counts")}
    return BulkLoad(**plain, state=LoadState(row["state"]), counts=_counts(row))


def _counts(row: dict[str, Any]) -> LoadCounts:
    """Count each row of a load once.

    If a task of writer jdbc ran again, it staged its rows again, and the chunks have read them twice. Its survey has
    counted rejected rows that no chunk has; a finished run has the sum.
    """
    has_sum = row["finished_at"] is not None and row["rows_rejected"] is not None
    rejected = row["rows_rejected"] if has_sum else (row["rows_rejected"] or 0) + row["chunk_rejected"]
    distinct = row["already_processed"] + row["applied"] + row["expired"]
    is_counted = row["rows_read"] is not None
    loadable = (row["rows_read"] if is_counted else row["chunk_rows"]) - rejected
    met = loadable if row["finished_at"] else min(loadable, row["chunk_rows"] - row["chunk_rejected"])
    duplicates = max(0, met - distinct)
    return LoadCounts(
        read=row["rows_read"],
        rejected=rejected,
        duplicate_in_source=duplicates,
        already_processed=row["already_processed"] - row["parked"],
        parked=row["parked"],
        expired=row["expired"],
        applied=row["applied"],
        left=loadable - duplicates - distinct if is_counted else None,
    )
