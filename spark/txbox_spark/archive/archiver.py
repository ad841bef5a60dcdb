"""Copies days that are over from Postgres into a folder, each row once.

::

    1  begin       insert the archive's row, COMMIT: from now on nothing is forgotten that it does not have
    2  settle      wait for transactions that began before the last day was over
    3  stage       Spark writes the days into this run's folder, and counts what it has written
    4  propose     the row gets the list of these days, COMMIT, unless another run was first
    5  in place    each day's folder is moved, then a file lists the days
    6  finish      the row says how far the archive reaches, COMMIT: a maintainer may forget

A run that is killed before 4 has changed nothing; its folder is removed later. If it is killed after 4, the next run
finishes it, because the row says which days to move. Readers see only days that such a file lists.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from sqlalchemy import URL, NullPool

from txbox import InvalidConfiguration
from txbox.postgres.engines import open_engine
from txbox.postgres.server import SERVER
from txbox.postgres.sql import unescaped
from txbox.postgres.urls import database_url
from txbox_spark.archive.archive_folder import (
    BEGINNING,
    DAY,
    PROCESSED,
    SENT,
    ArchivedDay,
    ArchiveFolder,
    ArchiveStretch,
)
from txbox_spark.archive.archive_ledger import ArchiveLedger, ArchiveState
from txbox_spark.loading.progress_reporter import ProgressReporter
from txbox_spark.reading.errors import SourceError, explained
from txbox_spark.report import OnProgress
from txbox_spark.runtime.jdbc import literal, ranges_of, read_table
from txbox_spark.runtime.jobs import changed_settings, job_group, small_plans
from txbox_spark.runtime.lazy_imports import DataFrame, SparkSession, sql
from txbox_spark.runtime.session import refuse_connect, require_jdbc_driver

SETTLE = timedelta(hours=1)
"""How long a day must be over before it is archived; the clocks of one Postgres cluster differ by less."""

WAIT_SECONDS = 60.0

SENT_ROWS = 100_000
"""At least how many sent messages one task reads, in whole hours."""

FETCHED_SENT = 500
FETCHED_IDS = 10_000
"""At most how many rows a task holds at a time: fewer if they have bodies."""

FETCHED_BYTES = 8 << 20
"""How many bytes of sent messages a task holds at a time, unless a single row is wider."""

FORGOTTEN_RUN = timedelta(days=2)
"""How old the folder of a killed run must be before it is removed; the folder of a working run is younger."""


@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """What a run added to an archive.

    Attributes:
        location: the folder's full address.
        since: the start of the days that were added; None if they start at the beginning, or none were added.
        upto: the archive has everything before this time; None if it is empty.
        days: how many days with rows were added.
        sent: how many sent messages were added.
        processed: how many inbox rows were added.
        finished_earlier: whether the run moved days into place that an earlier run had written.
    """

    location: str
    since: datetime | None
    upto: datetime | None
    days: int
    sent: int
    processed: int
    finished_earlier: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict of plain values."""
        return asdict(self)


def archive(
    spark: SparkSession,
    location: str,
    *,
    url: str | URL,
    schema: str | None = None,
    prefix: str = "",
    upto: datetime | None = None,
    settle: timedelta = SETTLE,
    wait_seconds: float = WAIT_SECONDS,
    on_progress: OnProgress | None = None,
) -> ArchiveReport:
    """Add the days that are over to an archive: the sent messages that relays keep, and the ids of all inboxes.

    Each row goes into the archive once, even if runs are killed or overlap. From the first run on, neither a
    maintainer nor a relay forgets what the archive does not have.

    Args:
        spark: the Spark session.
        location: a folder that Spark's Hadoop can reach, used by this archive alone.
        url: the database; executors must reach it over TCP.
        schema: the Postgres schema of the tables; None means the search path decides.
        prefix: what the tables' names start with.
        upto: archive only days before the UTC day of this time; None means all that are over.
        settle: how long a day must be over.
        wait_seconds: how long to wait for open transactions that may still write rows of such a day.
        on_progress: called with the progress, from its own thread.

    Raises:
        InvalidConfiguration: an argument is invalid, a transaction stays open, or the folder is not this archive's.
        SchemaMissing: a table does not exist.
        SourceError: Spark cannot read the tables, or write the folder.
        SparkSetupError: Spark has no JDBC driver for Postgres.
    """
    refuse_connect(spark, "archive", "run it where Spark is not remote: txbox archive")
    if settle < timedelta(0):
        raise InvalidConfiguration("settle must not be negative")
    if upto is not None and upto.tzinfo is None:
        raise InvalidConfiguration("upto must have a time zone")
    require_jdbc_driver(spark)
    database = database_url(url)
    engine = open_engine(database, poolclass=NullPool)
    folder = ArchiveFolder(spark, location)
    ledger = ArchiveLedger(engine, schema, prefix, folder.location)
    state = _begin(folder, ledger)
    finished_earlier = state.pending is not None
    if state.pending is not None:
        _finish(folder, ledger, state.pending)
        state = ledger.begin()
    since = state.archived_upto
    beyond = ledger.cutoff(settle)
    if upto is not None:
        day = upto.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        beyond = min(beyond, day)
    if since is not None and beyond <= since:
        return ArchiveReport(folder.location, None, since, 0, 0, 0, finished_earlier)
    ledger.wait_until_settled(beyond, wait_seconds=wait_seconds)
    _remove_forgotten(folder)
    run = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
    first = since or BEGINNING
    with (
        small_plans(spark),
        job_group(spark.sparkContext, f"txbox archive: {folder.location}") as group,
        ProgressReporter(spark, on_progress).spark_stage("archive", None, group),
    ):
        rows = _Rows(spark, database, ledger, first, beyond)
        days = {SENT: rows.write_sent(folder, run), PROCESSED: rows.write_processed(folder, run)}
    stretch = ArchiveStretch(state.archive_id, run, first, beyond, days)
    if folder.read_identity() != state.archive_id:
        ledger.abandon(state.archive_id)  # the folder is theirs, so our row must hold nothing back
        folder.remove(folder.staged(run))
        raise InvalidConfiguration(f"another database has begun an archive at {folder.location} meanwhile")
    if not ledger.propose(stretch, since):
        folder.remove(folder.staged(run))
        why = "the archive was released" if ledger.read() is None else "another run has added these days"
        raise InvalidConfiguration(f"{folder.location}: {why} meanwhile, so this run has added none; nothing is lost")
    _finish(folder, ledger, stretch)
    added = len({day for of_kind in days.values() for day in of_kind})
    return ArchiveReport(
        folder.location, since, beyond, added, stretch.rows(SENT), stretch.rows(PROCESSED), finished_earlier
    )


def release(location: str, *, url: str | URL, schema: str | None = None, prefix: str = "") -> bool:
    """Forget an archive, so that maintainers and relays may forget what it does not have; its folder stays.

    Args:
        location: the folder, as ``txbox status`` shows it, or as a path on this machine.
        url: the database.
        schema: the Postgres schema of the tables; None means the search path decides.
        prefix: what the tables' names start with.

    Returns:
        Whether there was one.
    """
    engine = open_engine(database_url(url), poolclass=NullPool)
    names = {location, location.rstrip("/"), f"file:{Path(location).absolute()}"}
    return sum(ArchiveLedger(engine, schema, prefix, name).release() for name in names) > 0


def _begin(folder: ArchiveFolder, ledger: ArchiveLedger) -> ArchiveState:
    """Return the archive's state; begin the archive if it is new. A refused folder leaves no row behind."""
    ledger.check()
    state = ledger.read()
    if state is not None:
        _check_folder(folder, state)
        return state
    if folder.read_identity() is not None or folder.stretches():
        raise InvalidConfiguration(
            f"{folder.location} is an archive that this database does not know: it was released, or is that of another "
            "database, or of tables that were made anew; give another folder"
        )
    state = ledger.begin()
    try:
        _check_folder(folder, state)
    except Exception:
        ledger.abandon(state.archive_id)
        raise
    return state


def _check_folder(folder: ArchiveFolder, state: ArchiveState) -> None:
    """Raise if the folder is another archive's, or does not have what Postgres says it has."""
    identity, stretches = folder.read_identity(), folder.stretches()
    ids = {one.archive_id for one in stretches} | ({identity} if identity is not None else set())
    if ids - {state.archive_id}:
        raise InvalidConfiguration(
            f"{folder.location} is the archive of another database, or of tables that were made anew; give another "
            "folder"
        )
    reached = stretches[-1].beyond if stretches else None
    put = state.pending is not None and reached == state.pending.beyond
    if reached != state.archived_upto and not put:
        has, says = (
            ("nothing" if one is None else f"days up to {one.date()}") for one in (reached, state.archived_upto)
        )
        raise InvalidConfiguration(
            f"{folder.location} has {has}, and the database says {says}. If the database was restored from a backup, "
            "begin another folder, and release this one (txbox archive FOLDER --release); if files of the archive were "
            "lost, bring them back"
        )
    if identity is None:
        folder.write_identity(state.archive_id)


def _finish(folder: ArchiveFolder, ledger: ArchiveLedger, stretch: ArchiveStretch) -> None:
    folder.put_in_place(stretch)
    if ledger.finish(stretch):
        _log.info("%s has everything up to %s", folder.location, stretch.beyond.date())


def _remove_forgotten(folder: ArchiveFolder) -> None:
    """Remove the folders of runs that were killed before they proposed their days."""
    oldest = f"{datetime.now(UTC) - FORGOTTEN_RUN:%Y%m%dT%H%M%SZ}"
    for run in folder.runs():
        if run < oldest:
            folder.remove(folder.staged(run))


class _Rows:
    """Copies the rows of some days from Postgres into the folder of a run."""

    def __init__(
        self, spark: SparkSession, database: URL, ledger: ArchiveLedger, first: datetime, beyond: datetime
    ) -> None:
        self._spark, self._database, self._ledger = spark, database, ledger
        self._first, self._beyond = first, beyond

    def write_sent(self, folder: ArchiveFolder, run: str) -> dict[str, ArchivedDay]:
        """Write the sent messages; each task reads some hours of one day."""
        hours, widest = self._ledger.count_sent(self._first, self._beyond)
        expected: dict[str, int] = {}
        for hour, rows in hours:
            expected[hour.date().isoformat()] = expected.get(hour.date().isoformat(), 0) + rows
        if not hours:
            return {}
        held = max(1, FETCHED_BYTES // max(1, widest))
        frame = self._read(self._ledger.sql.rows_sent, _hour_ranges(hours, self._beyond), min(FETCHED_SENT, held))
        return self._write(frame, folder, run, SENT, expected, held)

    def write_processed(self, folder: ArchiveFolder, run: str) -> dict[str, ArchivedDay]:
        """Write the inbox rows; each task reads a range of ids, then Spark groups the rows by day."""
        expected = self._ledger.count_processed(self._first, self._beyond)
        bounds = self._ledger.inbox_bounds()
        time = f"processed_at >= {literal(self._first)} AND processed_at < {literal(self._beyond)}"
        keys = [f"({literal(subscriber)}, {literal(message)})" for subscriber, message in bounds]
        ranges = [f"{one} AND {time}" for one in ranges_of("(subscriber_id, message_id)", keys)]
        frame = self._read(self._ledger.sql.rows_processed, ranges, FETCHED_IDS).hint("rebalance", DAY)
        return self._write(frame, folder, run, PROCESSED, expected, FETCHED_IDS)

    def _read(self, statement: str, ranges: Sequence[str], fetched: int) -> DataFrame:
        # Spark runs this statement in the reading transaction, so it does not outlive it in a connection pool.
        unlimited = {"sessionInitStatement": unescaped(SERVER.no_time_limit)}
        table = f"({unescaped(statement)}) AS archived"
        with explained("cannot read over JDBC what is to be archived"):
            return read_table(self._spark, self._database, table, fetched=fetched, ranges=ranges, options=unlimited)

    def _write(
        self, frame: DataFrame, folder: ArchiveFolder, run: str, kind: str, expected: Mapping[str, int], held: int
    ) -> dict[str, ArchivedDay]:
        """Write rows by day, and raise ``SourceError`` unless the counts are those of Postgres.

        ``held`` is how many rows Parquet's writer may take before it checks how much it holds; its default is a
        hundred.
        """
        target = folder.staged(run, kind)
        with explained(f"cannot write {target}"):
            with changed_settings(self._spark, _FILES):
                looks = {f"parquet.{part}.size.row.check.min": str(min(100, held)) for part in ("page", "block")}
                frame.write.options(**looks).partitionBy(DAY).mode("errorifexists").parquet(target)
            names = [name.partition("=")[2] for name in folder.files(target)]
            if not names and not expected:
                return {}
            day = sql.col(DAY).cast("string")
            counted = sql.count(sql.lit(1)), sql.count_if(sql.expr(_SETTLED[kind]))
            written = self._spark.read.parquet(target).groupBy(day).agg(*counted)
            counts = {row[0]: (row[1], row[2]) for row in written.collect()}
        settled = {day: one for day, (_, one) in counts.items() if one}
        if settled != dict(expected):
            raise SourceError(
                f"{sum(settled.values()):,} rows of {kind} were written, and Postgres counts "
                f"{sum(expected.values()):,}: rows were changed by hand meanwhile, or deleted. Nothing is archived; "
                "run it again"
            )
        return {day: ArchivedDay(counts[day][0], folder.files(f"{target}/{DAY}={day}")) for day in sorted(names)}


def _hour_ranges(hours: Sequence[tuple[datetime, int]], beyond: datetime) -> list[str]:
    """Return SQL conditions that cut the hours into parts of at least ``SENT_ROWS`` rows, each within one day."""
    cuts, rows = [hours[0][0]], 0
    for before, (hour, count) in zip([None, *hours], hours, strict=False):
        if before is not None and (rows >= SENT_ROWS or hour.date() != cuts[-1].date()):
            cuts.append(hour)
            rows = 0
        rows += count
    return [f"sent_at >= {literal(low)} AND sent_at < {literal(high)}" for low, high in pairwise([*cuts, beyond])]


_FILES = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}
"""Microseconds, as in Postgres, whatever the session's setting; Spark's default is a type that Parquet deprecated."""

_SETTLED = {SENT: "true", PROCESSED: "state = 'processed'"}
"""Which rows no longer change; a parked message's row is removed when it is redriven."""

_log = logging.getLogger("txbox.spark")
