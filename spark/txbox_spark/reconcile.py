"""Compares an archive of events with the inbox: finds what was never processed, and what the archive lacks.

::

    archive ── prepare ── ids, counted ──┐
                                         ├── full outer join, kept ──┬── counts and samples ──> Reconciliation
    inbox ─── ranges of ids over JDBC ───┘                           ├── archive's rows ──────> never_processed/
                                                                     └── ids, times ──────────> not_archived/

The join is kept until the end, so that counts, samples and files agree. Only counts and samples reach the driver.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import URL, Connection, NullPool

from txbox import Inbox, InvalidConfiguration
from txbox.operations.audit.sides import AuditStatements
from txbox.postgres.engines import open_engine
from txbox.postgres.sql import quoted, unescaped
from txbox.postgres.transactions import check_table
from txbox.postgres.urls import database_url
from txbox.schema import tables
from txbox_spark.archive.archive_folder import read_archive
from txbox_spark.loading.ledger import warn_of_new_subscriber
from txbox_spark.loading.progress_reporter import ProgressReporter
from txbox_spark.reading.errors import explained
from txbox_spark.reading.event_rows import prepare
from txbox_spark.report import OnProgress
from txbox_spark.runtime.jdbc import literal, parts_of, ranges_of, read_table, sampled_percent
from txbox_spark.runtime.jobs import job_group, small_plans
from txbox_spark.runtime.lazy_imports import Column, DataFrame, SparkSession, sql
from txbox_spark.runtime.session import refuse_connect

NEVER_PROCESSED = "never_processed"
NOT_ARCHIVED = "not_archived"

FETCHED_ROWS = 10_000
"""How many rows a task fetches at a time."""


@dataclass(frozen=True, slots=True)
class NotArchived:
    message_id: str
    processed_at: datetime


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The result of a comparison; ``archived - never_processed`` equals ``processed - not_archived``.

    Attributes:
        archived: distinct ids in the archive.
        rejected: rows of the archive that cannot be loaded, and are not compared.
        duplicate_in_archive: rows of the archive that repeat another row's id; one row of each id is not counted.
        processed: ids that this subscriber has processed.
        never_processed: ids of the archive that were not processed, including those that are parked.
        parked, expired, discarded: those of ``never_processed`` that the inbox nevertheless has, with the states of an
            audit: it waits as a dead letter, it came too late to run and waits, or a person gave it up.
        never_processed_sample: the first ids of ``never_processed``.
        not_archived: processed ids that are not in the archive.
        not_archived_sample: the first of these, with the time at which they were processed.
        output: the folder with all of them; None if none was given.
    """

    archived: int
    rejected: int
    duplicate_in_archive: int
    processed: int
    never_processed: int
    parked: int
    expired: int
    discarded: int
    never_processed_sample: tuple[str, ...]
    not_archived: int
    not_archived_sample: tuple[NotArchived, ...]
    output: str | None

    @property
    def complete(self) -> bool:
        """Whether every row of the archive was processed. The inbox may hold more than this archive."""
        return self.never_processed == 0 and self.rejected == 0

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a dict of plain values."""
        return {**asdict(self), "complete": self.complete}


def reconcile(
    events: DataFrame,
    *,
    url: str | URL,
    subscriber_id: str,
    message_id: str,
    schema: str | None = None,
    prefix: str = "",
    forgotten: str | None = None,
    output: str | None = None,
    sample: int = 10,
    partitions: int | None = None,
    on_progress: OnProgress | None = None,
) -> Reconciliation:
    """Compare an archive with a subscriber's inbox, which keeps ids only as long as its retention.

    If you use ``txbox archive``, pass its folder as ``forgotten``: it has the ids that a maintainer has forgotten. The
    archive to compare may itself be its sent messages: ``read_archive(spark, folder).sent(["queue"])``.

    Several transactions read the inbox while workers continue. An event that is processed meanwhile may count as never
    processed, and one that arrives meanwhile as not archived.

    Args:
        events: the archive, for example from ``read_events``.
        url: the database; executors must reach it over TCP.
        subscriber_id: the subscriber whose inbox is compared.
        message_id: the column that holds the id, or a Spark SQL expression that computes it.
        schema: the Postgres schema of the tables; None means the search path decides.
        prefix: what the tables' names start with.
        forgotten: the folder of ``txbox archive``, with what was processed and is no longer in the inbox.
        output: a folder that Spark's Hadoop can reach. Parquet is written to ``never_processed``, with unchanged rows
            of the archive, one per id, and to ``not_archived``, with ``message_id`` and ``processed_at``.
        sample: how many ids of each kind to return.
        partitions: how many tasks read the inbox; None means that its size decides.
        on_progress: called with the progress, from its own thread.

    Raises:
        InvalidConfiguration: an argument is invalid, or the output exists.
        SchemaMissing: the inbox does not exist.
        SourceError: Spark cannot read the inbox, or write the output.
    """
    refuse_connect(
        events, "reconcile", 'join the archive with spark.read.format("txbox") and option("table", "inbox") by hand'
    )
    if sample < 0:
        raise InvalidConfiguration("sample must not be negative")
    if partitions is not None and partitions < 1:
        raise InvalidConfiguration("partitions must be at least 1")
    Inbox(subscriber_id)  # raises if the name is invalid
    database = database_url(url)
    spark = events.sparkSession
    identified = prepare(events, message_id).identified
    targets = {} if output is None else _targets(spark, output)
    inbox = _inbox(spark, database, subscriber_id, schema, prefix, partitions)
    if forgotten is not None:
        redriven = _redriven(spark, database, subscriber_id, schema, prefix)
        inbox = _with_forgotten(inbox, redriven, read_archive(spark, forgotten).processed(subscriber_id))
    with (
        small_plans(spark),
        job_group(spark.sparkContext, f"txbox reconcile: the inbox of {subscriber_id}") as group,
        ProgressReporter(spark, on_progress).spark_stage("compare", None, group),
    ):
        return _compare(identified, inbox, sample, output, targets)


def _compare(
    identified: DataFrame, inbox: DataFrame, sample: int, output: str | None, targets: Mapping[str, str]
) -> Reconciliation:
    # All rejected rows have a null id, so they form one group, which matches nothing in the join.
    archive = identified.groupBy(sql.col("message_id").alias(_ARCHIVED)).agg(sql.count(sql.lit(1)).alias(_ROWS))
    joined = archive.join(inbox, sql.col(_ARCHIVED) == sql.col(_PROCESSED), "full_outer").persist()
    state = sql.coalesce(sql.col(_STATE), sql.lit(""))
    archived, processed = sql.col(_ARCHIVED).isNotNull(), state == sql.lit("processed")
    never_processed = joined.where(archived & ~processed).select(_ARCHIVED)
    not_archived = joined.where(processed & ~archived).select(sql.col(_PROCESSED).alias("message_id"), _PROCESSED_AT)
    try:
        row = joined.agg(
            _sum_where(archived).alias("archived"),
            _sum_where(~archived, sql.coalesce(_ROWS, sql.lit(0))).alias("rejected"),
            _sum_where(archived, sql.col(_ROWS) - 1).alias("duplicate_in_archive"),
            _sum_where(processed).alias("processed"),
            _sum_where(archived & ~processed).alias("never_processed"),
            *(_sum_where(archived & (state == sql.lit(name))).alias(name) for name in _OTHER_STATES),
            _sum_where(processed & ~archived).alias("not_archived"),
        ).collect()[0]
        never_sample = never_processed.orderBy(_ARCHIVED).limit(sample).collect()
        # Not as a timestamp: pyspark converts it to local time and drops the zone.
        times = not_archived.select("message_id", sql.unix_micros(_PROCESSED_AT))
        not_archived_sample = times.orderBy("message_id").limit(sample).collect()
        if targets:
            rows = identified.join(never_processed, sql.col("message_id") == sql.col(_ARCHIVED), "left_semi")
            _write(rows.dropDuplicates(["message_id"]).select("event.*"), targets[NEVER_PROCESSED])
            _write(not_archived, targets[NOT_ARCHIVED])
    finally:
        joined.unpersist()
    return Reconciliation(
        **row.asDict(),
        never_processed_sample=tuple(one[0] for one in never_sample),
        not_archived_sample=tuple(
            NotArchived(one[0], _EPOCH + timedelta(microseconds=one[1])) for one in not_archived_sample
        ),
        output=output,
    )


def _inbox(
    spark: SparkSession, database: URL, subscriber_id: str, schema: str | None, prefix: str, partitions: int | None
) -> DataFrame:
    """Return a subscriber's inbox as a DataFrame that several tasks read."""
    inbox = tables(schema, prefix).processed_message
    inbox_name = unescaped(quoted(inbox))
    engine = open_engine(database, poolclass=NullPool)
    with engine.connect() as connection:
        for one in (inbox, tables(schema, prefix).dead_letter):
            check_table(connection, one)
        bounds = _bounds(connection, inbox_name, subscriber_id, partitions)
    warn_of_new_subscriber(engine, schema, prefix, subscriber_id)
    state = unescaped(AuditStatements.load(schema, prefix).state)
    table = (
        f"(SELECT message_id, processed_at, {state} AS {_STATE} "  # noqa: S608 - quoted
        f"FROM {inbox_name} AS entry WHERE subscriber_id = {literal(subscriber_id)}) AS inbox"
    )
    ranges = ranges_of("message_id", map(literal, bounds))
    with explained("cannot read the inbox over JDBC"):
        frame = read_table(spark, database, table, fetched=FETCHED_ROWS, ranges=ranges)
    return frame.selectExpr(f"message_id AS {_PROCESSED}", _PROCESSED_AT, _STATE)


def _redriven(spark: SparkSession, database: URL, subscriber_id: str, schema: str | None, prefix: str) -> DataFrame:
    """Return a subscriber's redriven messages as rows of its inbox; a redrive neither processes nor discards."""
    letters = unescaped(quoted(tables(schema, prefix).dead_letter))
    table = (
        f"(SELECT message_id AS {_PROCESSED}, redriven_at AS {_PROCESSED_AT}, 'redriven' AS {_STATE} "  # noqa: S608 - quoted
        f"FROM {letters} WHERE subscriber_id = {literal(subscriber_id)} AND redriven_at IS NOT NULL) AS redriven"
    )
    with explained("cannot read dead letters over JDBC"):
        return read_table(spark, database, table, fetched=FETCHED_ROWS)


def _with_forgotten(inbox: DataFrame, redriven: DataFrame, archived: DataFrame) -> DataFrame:
    """Add what an inbox has forgotten, one row per id.

    A message that was parked when its day was archived stays in the inbox as long as it waits. If it was redriven, its
    letter says so, and it was archived as processed on a later day, was lost, or is still on its way. Otherwise it was
    discarded.
    """
    processed = sql.col("state") == "processed"
    state = sql.when(processed, "processed").otherwise("discarded").alias(_STATE)
    ids = sql.col("message_id").alias(_PROCESSED)
    every = (
        inbox.withColumn(_RANK, sql.lit(2))
        .unionByName(redriven.withColumn(_RANK, sql.lit(1)))
        .unionByName(archived.select(ids, _PROCESSED_AT, state).withColumn(_RANK, sql.lit(0)))
    )
    best = sql.max(sql.struct(sql.col(_STATE) == "processed", _RANK, _PROCESSED_AT, _STATE)).alias("best")
    return every.groupBy(_PROCESSED).agg(best).select(_PROCESSED, f"best.{_PROCESSED_AT}", f"best.{_STATE}")


def _bounds(connection: Connection, table: str, subscriber_id: str, partitions: int | None) -> list[str]:
    """Return ids that cut a subscriber's inbox evenly: quantiles of a sample of the table's blocks.

    They are exact for a table of up to ``SAMPLED_BYTES``.
    """
    size = int(connection.exec_driver_sql("SELECT pg_relation_size(%s::regclass)", (table,)).scalar_one())
    parts = partitions or parts_of(size)
    if parts == 1:
        return []
    escaped = table.replace("%", "%%")
    quantiles = (
        "SELECT percentile_disc(%s::float8[]) WITHIN GROUP (ORDER BY message_id) "  # noqa: S608 - quoted, and bound
        f"FROM {escaped} TABLESAMPLE SYSTEM (%s::real) WHERE subscriber_id = %s"
    )
    fractions = [part / parts for part in range(1, parts)]
    return connection.exec_driver_sql(quantiles, (fractions, sampled_percent(size), subscriber_id)).scalar_one() or []


def _targets(spark: SparkSession, output: str) -> dict[str, str]:
    """Return the folders to write to; raise if one of them exists."""
    from pyspark.errors import AnalysisException

    targets = {name: f"{output.rstrip('/')}/{name}" for name in (NEVER_PROCESSED, NOT_ARCHIVED)}
    for target in targets.values():
        with explained(f"cannot write to {target}"):
            try:
                spark.read.format("binaryFile").load(target)
            except AnalysisException as error:
                if error.getCondition() == "PATH_NOT_FOUND":
                    continue
                raise
        raise InvalidConfiguration(f"there is something at {target} already; give another output, or remove it")
    return targets


def _write(frame: DataFrame, target: str) -> None:
    files = max(1, frame.sparkSession.sparkContext.defaultParallelism)
    with explained(f"cannot write {target}"):
        frame.coalesce(files).write.mode("errorifexists").parquet(target)


def _sum_where(condition: Column, value: Column | None = None) -> Column:
    return sql.coalesce(sql.sum(sql.when(condition, sql.lit(1) if value is None else value)), sql.lit(0))


_ARCHIVED = "archived_id"
_ROWS = "archived_rows"
_PROCESSED = "processed_id"
_PROCESSED_AT = "processed_at"
_STATE = "state"
_RANK = "rank"
_OTHER_STATES = ("parked", "expired", "discarded")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
