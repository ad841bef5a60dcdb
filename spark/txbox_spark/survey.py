"""Makes a first pass over the events: counts the rows, samples their ids, and computes a digest of all ids."""

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
"""How many ids are sampled to choose the bounds of the chunks."""

FEW_ROWS = 10_000
"""At most how many events the driver's Python may hold to merge them itself."""

FEW_BYTES = 4 << 20
"""How large their files may be in that case."""


@dataclass(frozen=True, slots=True)
class Survey:
    rows: int  # rejected ones included
    sample: tuple[str, ...]  # drawn evenly from all distinct ids, sorted as Postgres sorts them
    content: bytes  # a digest of all rows' ids, rejected rows included; the order does not matter
    rejected: int | None = None  # None if they were not counted
    remarks: Remarks = NO_REMARKS  # about some of the rejected rows


def seem_few(events: DataFrame) -> bool:
    """Return whether the events' files are so small, by Spark's estimate, that the driver may hold them.

    It reads no data.
    """
    if not events.inputFiles():  # for other sources, Spark's estimate is too rough
        return False
    plan: Any = events._jdf.queryExecution().optimizedPlan()  # noqa: SLF001
    return int(plan.stats().sizeInBytes()) <= FEW_BYTES


def survey_few(events: PreparedEvents) -> Survey | None:
    """Return what ``survey`` does, without the rejected rows; None if there are more than ``FEW_ROWS`` rows.

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

    With ``count_rejected``, count the rejected rows, too. Spark then reads every text column, not only the ids.
    """
    from pyspark.sql import Observation

    # An observation, because a separate count would be another pass. It is exact if the pass ends in one stage, as it
    # does here: Spark then counts each task once, however often it ran. (It cannot observe a write over JDBC, whose
    # plan runs where no observation is reported.)
    observation = Observation()
    metrics = _content_metrics(GIVEN_ID if count_rejected else MESSAGE_ID)
    if count_rejected:
        metrics += [sql.count(REJECTED).alias("rejected"), sql.min(REJECTED).alias("a"), sql.max(REJECTED).alias("z")]
    rows = events.identified if count_rejected else events.ids
    drawn = (
        rows.observe(observation, *metrics)
        .where(_is_valid())
        .select(MESSAGE_ID, sql.xxhash64(MESSAGE_ID).alias("hashed"))
        .orderBy("hashed")  # a column: Spark would compute an expression again for each comparison
        .limit(SAMPLE_IDS)
        .collect()
    )
    found = observation.get
    if found["rows"] and len(drawn) < SAMPLE_IDS:
        # If Spark finds fewer ids than the limit, it drops the limit and sorts them all. For the sort it samples the
        # rows first, and until Spark 4.3 those were observed twice (SPARK-37487, SPARK-58183). Counting so few again
        # is quick.
        found = rows.agg(*metrics).collect()[0].asDict()
    sample = tuple(sorted({row[0] for row in drawn}))
    rejected = {one for one in (found.get("a"), found.get("z")) if one is not None}
    shown = Remarks(sample=tuple(sorted(RejectedRow.from_json(one).shown for one in rejected)))
    return Survey(int(found["rows"]), sample, _digest(found), found.get("rejected"), shown)


def rejected_causes(events: PreparedEvents) -> tuple[RejectedCause, ...]:
    """Count rejected rows by cause, in a separate pass."""
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
    """Return Spark's expression for whether a row's id can be recorded."""
    return (
        sql.octet_length(MESSAGE_ID).between(1, MAX_MESSAGE_ID_BYTES)
        & ~sql.contains(MESSAGE_ID, sql.lit("\0"))
        & sql.is_valid_utf8(MESSAGE_ID)
    )


def content_digest(events: PreparedEvents) -> tuple[int, bytes]:
    """Return how many rows there are, and the digest of their ids, equal to that of any ``survey``."""
    found = events.ids.agg(*_content_metrics(MESSAGE_ID)).collect()[0].asDict()
    return int(found["rows"]), _digest(found)


def count_rejected_rows(events: PreparedEvents) -> int:
    """Count the rows that cannot be loaded, in a separate pass."""
    return events.identified.where(sql.col(REJECTED).isNotNull()).count()


def _content_metrics(column: str) -> list[Column]:
    """Return expressions that count the rows and add up hashes of their ids.

    A sum does not depend on the order, and repeated ids count. The hashes are added in two halves, so that sums over
    billions of rows fit.
    """
    hashed = sql.xxhash64(column)
    return [
        sql.count(sql.lit(1)).alias("rows"),
        sql.sum(sql.shiftright(hashed, 32)).alias("upper"),
        sql.sum(sql.shiftright(sql.shiftleft(hashed, 32), 32)).alias("lower"),
    ]


def _lower_half(hashed: int) -> int:
    """Return the lower 32 bits of a hash as a signed number, as ``_content_metrics`` adds them."""
    lower = hashed & 0xFFFFFFFF
    return lower - (1 << 32) if lower >> 31 else lower


def _digest(found: Mapping[str, int | None]) -> bytes:
    return b"".join((found[name] or 0).to_bytes(8, "big", signed=True) for name in ("rows", "upper", "lower"))
