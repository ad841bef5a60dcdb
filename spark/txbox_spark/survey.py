"""A first pass over the events: how many rows there are, a sample of their ids, and a digest of all ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from txbox.messages.message import MAX_MESSAGE_ID_BYTES
from txbox_spark.reading.columns import MESSAGE_ID
from txbox_spark.reading.event_rows import GIVEN_ID, REJECTED, PreparedEvents
from txbox_spark.rejects.remarks import (
    NO_REMARKS,
    SHOWN_CAUSES,
    SHOWN_CHARACTERS,
    RejectedCause,
    RejectedRow,
    Remarks,
)
from txbox_spark.runtime.lazy_imports import Column, DataFrame, sql

SAMPLE_IDS = 20_000
"""How many ids the bounds of the chunks are chosen from."""

FEW_ROWS = 10_000
"""How many events the driver's Python may hold, where it merges them by itself."""

FEW_BYTES = 4 << 20
"""How large their files may be then."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a first pass over the events has found."""

    rows: int  # how many rows there are, bad ones included
    sample: tuple[str, ...]  # ids, evenly drawn from all distinct ones, sorted as Postgres sorts them
    content: bytes  # a digest of all rows' ids, those of rejected rows included, whatever their order
    rejected: int | None = None  # how many rows cannot be loaded; None if they were not counted
    remarks: Remarks = NO_REMARKS  # some of those


def seem_few(events: DataFrame) -> bool:
    """Whether events are from files so small that the driver may hold them, by Spark's estimate; nothing is read."""
    if not events.inputFiles():  # of what is made otherwise Spark knows too little
        return False
    plan: Any = events._jdf.queryExecution().optimizedPlan()  # noqa: SLF001
    return int(plan.stats().sizeInBytes()) <= FEW_BYTES


def survey_few(events: PreparedEvents) -> Survey | None:
    """Find what ``survey`` finds, without the rejected rows; None if there are more than ``FEW_ROWS``.

    A JVM that has just started takes seconds for the sort and the sums of ``survey``.
    """
    found = events.ids.select(
        sql.when(_is_valid(), sql.col(MESSAGE_ID)).alias(MESSAGE_ID), sql.xxhash64(MESSAGE_ID).alias("hashed")
    )
    rows = found.limit(FEW_ROWS + 1).collect()
    if len(rows) > FEW_ROWS:
        return None
    hashes = [hashed for _, hashed in rows]
    sums = {"rows": len(rows), "upper": sum(one >> 32 for one in hashes), "lower": sum(map(_lower_half, hashes))}
    return Survey(len(rows), tuple(sorted({one for one, _ in rows if one is not None})), _digest(sums))


def survey(events: PreparedEvents, *, count_rejected: bool) -> Survey:
    """Count the rows and sample ``SAMPLE_IDS`` ids, in one pass.

    With ``count_rejected``, the rejected rows too; then every text column is read, not the ids alone.
    """
    from pyspark.sql import Observation

    # An observation, since a count of its own would be another pass. It is exact where, as here, the pass ends in one
    # stage: then Spark counts each task once, however often it was run. (It cannot watch a write over JDBC, which runs
    # its plan where no observation is reported.)
    observation = Observation()
    metrics = _content_metrics(GIVEN_ID if count_rejected else MESSAGE_ID)
    if count_rejected:
        metrics += [sql.count(REJECTED).alias("rejected"), sql.min(REJECTED).alias("a"), sql.max(REJECTED).alias("z")]
    rows = events.identified if count_rejected else events.ids
    drawn = (
        rows.observe(observation, *metrics)
        .where(_is_valid())
        .orderBy(sql.xxhash64(MESSAGE_ID))
        .select(MESSAGE_ID)
        .limit(SAMPLE_IDS)
        .collect()
    )
    found = observation.get
    if found["rows"] and len(drawn) < SAMPLE_IDS:
        # Where Spark finds that there are fewer ids than the limit, it drops the limit and sorts all, for which it
        # samples the rows first; until Spark 4.3 those were observed twice (SPARK-37487, SPARK-58183). So few are soon
        # counted.
        found = rows.agg(*metrics).collect()[0].asDict()
    sample = tuple(sorted({row[0] for row in drawn}))
    rejected = {one for one in (found.get("a"), found.get("z")) if one is not None}
    shown = Remarks(sample=tuple(sorted(RejectedRow.from_json(one).shown for one in rejected)))
    return Survey(int(found["rows"]), sample, _digest(found), found.get("rejected"), shown)


def rejected_causes(events: PreparedEvents) -> tuple[RejectedCause, ...]:
    """Count rejected rows by their causes, in a pass of its own."""
    rejected = events.identified.where(sql.col(REJECTED).isNotNull()).select(REJECTED)
    row = sql.from_json(REJECTED, "cause string, column string, value string, event string").alias("row")
    value = sql.coalesce("row.value", sql.lit(""))
    found = (
        rejected.select(row)
        .groupBy("row.cause", "row.column")
        .agg(
            sql.count(sql.lit(1)).alias("rows"),
            sql.when(sql.min(value) == sql.max(value), sql.max("row.value")).alias("value"),
            sql.min(sql.left("row.event", sql.lit(SHOWN_CHARACTERS))).alias("example"),
        )
        .orderBy(sql.desc("rows"), "cause")
        .limit(SHOWN_CAUSES)
        .collect()
    )
    return tuple(RejectedCause(**one.asDict()) for one in found)


def _is_valid() -> Column:
    """Whether a row's id can be recorded, in Spark's expression."""
    return (
        sql.octet_length(MESSAGE_ID).between(1, MAX_MESSAGE_ID_BYTES)
        & ~sql.contains(MESSAGE_ID, sql.lit("\0"))
        & sql.is_valid_utf8(MESSAGE_ID)
    )


def content_digest(events: PreparedEvents) -> tuple[int, bytes]:
    """Return how many rows there are, and the digest of their ids: the same as that of any ``survey``."""
    found = events.ids.agg(*_content_metrics(MESSAGE_ID)).collect()[0].asDict()
    return int(found["rows"]), _digest(found)


def count_rejected_rows(events: PreparedEvents) -> int:
    """Count the rows that cannot be loaded, in a pass of its own."""
    return events.identified.where(sql.col(REJECTED).isNotNull()).count()


def _content_metrics(column: str) -> list[Column]:
    """Count the rows, and add up hashes of their ids: a sum does not depend on the order, and repeated ids count.

    Each hash in two halves, so that sums of billions of rows fit.
    """
    hashed = sql.xxhash64(column)
    return [
        sql.count(sql.lit(1)).alias("rows"),
        sql.sum(sql.shiftright(hashed, 32)).alias("upper"),
        sql.sum(sql.shiftright(sql.shiftleft(hashed, 32), 32)).alias("lower"),
    ]


def _lower_half(hashed: int) -> int:
    """Return the lower 32 bits of a hash, as ``_content_metrics`` adds them: with their own sign."""
    lower = hashed & 0xFFFFFFFF
    return lower - (1 << 32) if lower >> 31 else lower


def _digest(found: Mapping[str, int | None]) -> bytes:
    return b"".join((found[name] or 0).to_bytes(8, "big", signed=True) for name in ("rows", "upper", "lower"))
