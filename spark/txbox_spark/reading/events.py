"""Events as a bulk load needs them: each with its message id, the bad ones told from the good, cut into chunks.

A chunk is a range of message ids. A range is one stretch of the inbox's primary key: the search for ids that are
already there reads that stretch and no more, and inserts in sorted order meet pages that are still at hand. All
duplicates of an id are in one chunk, so chunks can be merged side by side without waiting for each other.

The bounds of the ranges are quantiles of a sample: the ids with the smallest hashes, which is a uniform sample of the
distinct ids, the same each time (bottom-k sampling: E. Cohen and H. Kaplan, "Summarizing Data using Bottom-k
Sketches", PODC 2007). So ids in order of time, at random, or in any other order are cut evenly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from txbox import InvalidConfiguration
from txbox.message import MAX_MESSAGE_ID_BYTES
from txbox_spark.reading.columns import MESSAGE_ID, EventColumn, Travelling, event_columns, quoted, refuse_twins
from txbox_spark.reading.readers import CORRUPT_RECORD

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "CHUNK",
    "MESSAGE_ID",
    "REJECTED",
    "SAMPLE_IDS",
    "Events",
    "Survey",
    "chunk_bounds",
    "chunk_number",
    "content",
    "partition_keys",
    "prepare",
    "survey",
]

REJECTED = "rejected"
"""The column that says why a row cannot be loaded."""
CHUNK = "chunk"
"""The column that says to which chunk a row belongs."""

SAMPLE_IDS = 20_000
"""How many ids the bounds of the chunks are chosen from."""

REJECTED_CHARACTERS = 300
"""How much of a rejected row is shown."""


@dataclass(frozen=True, slots=True)
class Events:
    """A source, understood.

    Attributes:
        identified: its rows as ``message_id`` (text; null if the row is rejected), ``rejected`` (the reason and the
            row; null unless it is) and ``event`` (a struct of the source's columns).
        staged: its rows as ``message_id``, ``rejected`` and the columns as they travel.
        ids: the ids alone, bad ones included, without looking at anything else.
        columns: the columns of ``fresh_event``, ``message_id`` apart.
    """

    identified: "DataFrame"
    staged: "DataFrame"
    ids: "DataFrame"
    columns: tuple[EventColumn, ...]

    @property
    def judged(self) -> "DataFrame":
        """Its rows as ``message_id`` and ``rejected`` alone."""
        return self.identified.select(MESSAGE_ID, REJECTED)


def prepare(frame: "DataFrame", message_id: str, column_types: Mapping[str, str] | None = None) -> Events:
    """Find each row's message id, and tell the rows that cannot be loaded.

    Args:
        frame: the source.
        message_id: the column that holds the id, or an expression of Spark SQL that makes it.
        column_types: Postgres types of columns, where Spark's own type does not say enough, such as
            ``{"order_id": "uuid", "payload": "jsonb"}``.

    Raises:
        InvalidConfiguration: there is no such column, or the columns cannot be loaded.
    """
    from pyspark.sql import functions as sql

    declared = dict(column_types or {})
    malformed = CORRUPT_RECORD in frame.columns
    source = frame.drop(CORRUPT_RECORD) if malformed else frame
    refuse_twins(source)
    identity, plain = _identity(source, message_id)
    if plain in declared:
        plain = None  # it arrives as text, and as what is declared beside it
    kept = source
    if MESSAGE_ID in source.columns:
        if message_id != MESSAGE_ID:
            raise InvalidConfiguration(
                f"the events have a column named {MESSAGE_ID}, which is not the id; rename it, or load it as the id"
            )
        kept = source.drop(MESSAGE_ID)
    nested = frame.select(
        identity.cast("string").alias(MESSAGE_ID),
        _file(frame).alias(_FILE),
        (sql.col(CORRUPT_RECORD) if malformed else sql.lit(None).cast("string")).alias(_MALFORMED),
        sql.struct(*[sql.col(quoted(name)) for name in source.columns]).alias(_EVENT),
    )
    travelling = event_columns(kept, declared, f"{_EVENT}.")
    # The id's own column is not sent twice if it is text already.
    beside = [one for one in travelling if one.column.name != plain]
    # In steps, so that what is sent is computed once, and the reason is too; Spark keeps them apart.
    sent = nested.select("*", *[one.value.alias(one.column.staged_as) for one in beside])
    judged = sent.select("*", _reason(beside).alias(_REASON))
    reason = sql.col(_REASON)
    # The ledger keeps it as JSON of Postgres, which cannot hold a NUL character either, nor what is not UTF-8.
    shown = sql.replace(
        sql.make_valid_utf8(sql.coalesce(sql.col(_MALFORMED), sql.to_json(sql.col(_EVENT)))),
        sql.lit("\0"),
        sql.lit(r"\u0000"),
    )
    rejected = sql.when(reason.isNotNull(), sql.concat_ws(": ", reason, sql.left(shown, sql.lit(REJECTED_CHARACTERS))))
    valid_id = sql.when(reason.isNull(), sql.col(MESSAGE_ID))
    columns = tuple(
        EventColumn(one.column.name, MESSAGE_ID, "text") if one.column.name == plain else one.column
        for one in travelling
    )
    staged = [one.column.staged_as for one in beside]
    return Events(
        identified=judged.select(valid_id.alias(MESSAGE_ID), rejected.alias(REJECTED), sql.col(_EVENT)),
        staged=judged.select(valid_id.alias(MESSAGE_ID), rejected.alias(REJECTED), *staged),
        ids=source.select(identity.cast("string").alias(MESSAGE_ID)),
        columns=columns,
    )


@dataclass(frozen=True, slots=True)
class Survey:
    """What a first pass over the events has found.

    Attributes:
        rows: how many rows there are, bad ones included.
        sample: ids, evenly drawn from all distinct ones, sorted as Postgres sorts them.
        content: a digest of the rows' ids, whatever their order.
        rejected: how many rows cannot be loaded; None if they were not judged.
        rejected_sample: some of those.
    """

    rows: int
    sample: tuple[str, ...]
    content: bytes
    rejected: int | None = None
    rejected_sample: tuple[str, ...] = ()


def survey(events: Events, *, judge: bool) -> Survey:
    """Count the rows and sample the ids, in one pass over many rows that keeps ``SAMPLE_IDS`` ids and no more.

    Args:
        events: the source.
        judge: count the rejected rows too, for which every column that is text must be read, and not the ids alone.
    """
    from pyspark.sql import Observation
    from pyspark.sql import functions as sql

    # An observation, since a count of its own would be another pass. It is exact where, as here, the pass ends in one
    # stage: then Spark counts each task once, however often it was run. (It cannot watch a write over JDBC, which runs
    # its plan where no observation is heard.)
    observation = Observation()
    metrics = _content()
    if judge:
        metrics += [sql.count(REJECTED).alias("rejected"), sql.min(REJECTED).alias("a"), sql.max(REJECTED).alias("z")]
    rows = _surveyed(events, judge=judge)
    drawn = (
        rows.observe(observation, *metrics)
        .where(
            sql.octet_length(MESSAGE_ID).between(1, MAX_MESSAGE_ID_BYTES)
            & ~sql.contains(MESSAGE_ID, sql.lit("\0"))
            & sql.is_valid_utf8(MESSAGE_ID)
        )
        .orderBy(sql.xxhash64(MESSAGE_ID))
        .select(MESSAGE_ID)
        .limit(SAMPLE_IDS)
        .collect()
    )
    found = observation.get
    if found["rows"] and len(drawn) < SAMPLE_IDS:
        # Where Spark knows that there are fewer ids than the limit, it drops the limit and sorts all, for which it
        # samples the rows first; until Spark 4.3 those were observed twice (SPARK-37487, SPARK-58183). So few are soon
        # counted.
        found = rows.agg(*metrics).collect()[0].asDict()
    sample = tuple(sorted({row[0] for row in drawn}))
    shown = tuple(sorted({one for one in (found.get("a"), found.get("z")) if one is not None}))
    return Survey(int(found["rows"]), sample, _digest(found), found.get("rejected"), shown)


def content(events: Events, *, judge: bool) -> tuple[int, bytes]:
    """Return how many rows there are, and the digest of their ids; in one pass, as ``survey`` does with ``judge``."""
    found = _surveyed(events, judge=judge).agg(*_content()).collect()[0].asDict()
    return int(found["rows"]), _digest(found)


def _surveyed(events: Events, *, judge: bool) -> "DataFrame":
    return events.identified if judge else events.ids


def _content() -> "list[Column]":
    """Count the rows, and add up hashes of their ids: a sum does not depend on the order, and repeated ids count.

    Each hash in two halves, so that sums of billions of rows fit.
    """
    from pyspark.sql import functions as sql

    hashed = sql.xxhash64(MESSAGE_ID)
    return [
        sql.count(sql.lit(1)).alias("rows"),
        sql.sum(sql.shiftright(hashed, 32)).alias("upper"),
        sql.sum(sql.shiftright(sql.shiftleft(hashed, 32), 32)).alias("lower"),
    ]


def _digest(found: Mapping[str, int | None]) -> bytes:
    return b"".join((found[name] or 0).to_bytes(8, "big", signed=True) for name in ("rows", "upper", "lower"))


def chunk_bounds(sample: Sequence[str], chunks: int) -> tuple[str, ...]:
    """Choose the bounds between chunks: bound k is the first id of chunk k + 1.

    Args:
        sample: distinct ids, sorted.
        chunks: how many chunks there should be; with few ids there are fewer.

    Returns:
        One bound less than there are chunks, sorted.
    """
    wanted = min(chunks, len(sample))
    return tuple(sample[len(sample) * number // wanted] for number in range(1, wanted))


def chunk_number(bounds: Sequence[str], leaves: Sequence[int] | None = None) -> "Column":
    """Return Spark's expression for an id's chunk, by binary search; a rejected row belongs to the last one.

    Args:
        bounds: from ``chunk_bounds``. Spark compares strings byte by byte, as Postgres does with COLLATE "C".
        leaves: what to return in place of the chunk's number, for each chunk.
    """
    from pyspark.sql import functions as sql

    numbers = range(len(bounds) + 1) if leaves is None else leaves
    if not bounds:
        return sql.lit(numbers[0])
    middle = len(bounds) // 2
    return sql.when(
        sql.col(MESSAGE_ID) < sql.lit(bounds[middle]), chunk_number(bounds[:middle], numbers[: middle + 1])
    ).otherwise(chunk_number(bounds[middle + 1 :], numbers[middle + 1 :]))


def partition_keys(partitions: int) -> tuple[int, ...]:
    """Return, for each partition, a number that ``repartition(partitions, number)`` sends there.

    Spark places a row by the Murmur3 hash of its key. With these keys every chunk gets a partition of its own; with
    the chunks' own numbers some would share one, and others would be empty.
    """
    keys: dict[int, int] = {}
    number = 0
    while len(keys) < partitions:
        keys.setdefault(_murmur3(number) % partitions, number)
        number += 1
    return tuple(keys[partition] for partition in range(partitions))


def _identity(frame: "DataFrame", message_id: str) -> tuple["Column", str | None]:
    """Return the id's expression, and the name of the column that is the id as it is."""
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as sql
    from pyspark.sql import types

    identity = sql.col(quoted(message_id)) if message_id in frame.columns else sql.expr(message_id)
    try:
        # With the other columns, as it is going to be used: beside them, an aggregate is an error.
        type_ = frame.select(identity, "*").schema.fields[0].dataType
    except (AnalysisException, ParseException) as error:
        what = str(error).splitlines()[0]
        raise InvalidConfiguration(
            f"message_id {message_id!r} is neither a column of the events ({', '.join(frame.columns[:20])}) "
            f"nor an expression over them: {what}"
        ) from error
    allowed = (types.StringType, types.IntegralType, types.DecimalType, types.DateType)
    if not isinstance(type_, allowed):
        raise InvalidConfiguration(
            f"message_id {message_id!r} is of type {type_.simpleString()}; an id is text or a whole number, as the "
            "live workers record it: cast it"
        )
    _refuse_other_ids_each_time(frame, identity, message_id)
    _refuse_the_same_id_for_all(frame, identity, message_id)
    return identity, message_id if message_id in frame.columns and isinstance(type_, types.StringType) else None


def _refuse_other_ids_each_time(frame: "DataFrame", identity: "Column", message_id: str) -> None:
    """Refuse uuid(), rand(), monotonically_increasing_id() and the like: events are read more than once."""
    from pyspark.errors import AnalysisException

    # Spark knows what is not deterministic, and refuses it in the condition of a join; nothing is run.
    nobody = frame.sparkSession.range(0).toDF("txbox_nobody")
    try:
        frame.join(nobody, identity.isNull())
    except AnalysisException as error:
        raise InvalidConfiguration(
            f"message_id {message_id!r} may be another one each time that it is asked for; an id must be the same when "
            "the event is read again (in place of input_file_name(), take _metadata.file_path)"
        ) from error


def _refuse_the_same_id_for_all(frame: "DataFrame", identity: "Column", message_id: str) -> None:
    """Refuse 'x', current_date() and the like, in the expression or in the column: one event would be all there is."""
    plan: Any = frame.select(identity)._jdf.queryExecution().optimizedPlan()  # noqa: SLF001
    rows = plan.maxRows()
    if plan.nodeName() == "Project" and plan.references().isEmpty() and (rows.isEmpty() or rows.get() > 1):
        raise InvalidConfiguration(
            f"message_id {message_id!r} is the same for every event, so that all but one would be duplicates; name a "
            "column that tells events apart, or an expression over such columns"
        )


def _file(frame: "DataFrame") -> "Column":
    """Return Spark's expression for the file that a row is from; null if the rows are not from files."""
    from pyspark.sql import functions as sql

    # To ask for it and see would have pyspark log an error.
    analyzed: Any = frame._jdf.queryExecution().analyzed()  # noqa: SLF001
    there = "_metadata#" in str(analyzed.metadataOutput().mkString(","))
    return sql.col("_metadata.file_path").cast("string") if there else sql.lit(None).cast("string")


def _reason(columns: Sequence[Travelling]) -> "Column":
    """Return Spark's expression for why a row cannot be loaded; null if it can.

    Args:
        columns: those that are sent beside the id.
    """
    from pyspark.sql import functions as sql

    def not_utf8(where: str) -> "Column":
        file = sql.coalesce(sql.concat(sql.lit(" of "), sql.col(_FILE)), sql.lit(""))
        return sql.concat(sql.lit(f"not UTF-8 in {where}"), file)

    identity = sql.col(MESSAGE_ID)
    reason = (
        sql.when(sql.col(_MALFORMED).isNotNull(), "malformed record")
        .when(identity.isNull(), "no message id")
        .when(identity == "", "empty message id")
        .when(~sql.is_valid_utf8(identity), not_utf8("the message id"))
        .when(
            sql.octet_length(identity) > MAX_MESSAGE_ID_BYTES, f"message id of more than {MAX_MESSAGE_ID_BYTES} bytes"
        )
        .when(sql.contains(identity, sql.lit("\0")), "NUL character in the message id")
    )
    for one in columns:
        if one.not_utf8 is not None:
            reason = reason.when(one.not_utf8, not_utf8(f"column {one.column.name}"))
        if one.holds_nul is not None:
            reason = reason.when(one.holds_nul, "NUL character, which Postgres cannot keep")
    return reason


def _murmur3(number: int) -> int:
    """Return Spark's ``hash`` of an integer: Murmur3 (A. Appleby), 32 bits, signed, seed 42."""
    bits = 0xFFFFFFFF
    mixed = number * 0xCC9E2D51 & bits
    mixed = (mixed << 15 | mixed >> 17) * 0x1B873593 & bits
    hashed = 42 ^ mixed
    hashed = ((hashed << 13 | hashed >> 19) & bits) * 5 + 0xE6546B64 & bits
    hashed ^= 4
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & bits
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & bits
    hashed ^= hashed >> 16
    return hashed - (1 << 32) if hashed >> 31 else hashed


_EVENT = "event"
_FILE = "file"
_MALFORMED = "malformed"
_REASON = "reason"
