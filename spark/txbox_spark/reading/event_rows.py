"""Prepares events: gives each row of a source its message id, and rows that cannot be loaded the reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from txbox.effects import Field
from txbox.messages.message import MAX_MESSAGE_ID_BYTES
from txbox_spark.reading.columns import (
    CORRUPT_RECORD,
    MESSAGE_ID,
    EventColumn,
    SentColumn,
    event_columns,
    quoted,
    refuse_duplicates,
    refuse_other_id,
)
from txbox_spark.reading.fields import field_columns
from txbox_spark.reading.files.file_listing import file_of
from txbox_spark.reading.identity import message_identity
from txbox_spark.reading.row_order import ANY, ROW_ORDER, row_order
from txbox_spark.rejects.remarks import VALUE_CHARACTERS
from txbox_spark.runtime.lazy_imports import Column, DataFrame, sql

__all__ = ["GIVEN_ID", "MESSAGE_ID", "REJECTED", "PreparedEvents", "prepare"]

GIVEN_ID = "given_id"
"""The column with a row's id, even if the row is rejected."""

REJECTED = "rejected"
"""The column that says why a row cannot be loaded: a ``RejectedRow`` as JSON; null if it can be loaded."""


@dataclass(frozen=True, slots=True)
class PreparedEvents:
    identified: DataFrame
    """The rows with ``message_id`` (text; null if the row is rejected), ``rejected`` (null unless it is), ``given_id``
    (the id, even of a rejected row) and ``event`` (a struct of the source's columns).
    """
    staged: DataFrame  # the rows with ``message_id``, ``rejected`` and the columns as they are sent
    ids: DataFrame  # the rows with only the id, invalid ids included
    columns: tuple[EventColumn, ...]  # of ``fresh_event``, besides ``message_id``
    order: EventColumn | None = None  # ``ROW_ORDER``, if ``staged`` has it

    @property
    def staged_columns(self) -> tuple[EventColumn, ...]:
        """The columns of a staging table besides ``message_id``."""
        return self.columns if self.order is None else (*self.columns, self.order)

    @property
    def checked_ids(self) -> DataFrame:
        """The rows with only ``message_id`` and ``rejected``."""
        return self.identified.select(MESSAGE_ID, REJECTED)


def prepare(
    frame: DataFrame,
    message_id: str,
    column_types: Mapping[str, str] | None = None,
    fields: Mapping[str, Field] | None = None,
    keep: str = ANY,
) -> PreparedEvents:
    """Return the rows with their message ids, and with the reason if they cannot be loaded.

    The arguments are those of ``bulk_load``. The columns are an effect's ``fields`` if given, otherwise the frame's.

    Raises:
        InvalidConfiguration: a column does not exist, or the columns cannot be loaded.
    """
    declared = dict(column_types or {})
    malformed = CORRUPT_RECORD in frame.columns
    source = frame.drop(CORRUPT_RECORD) if malformed else frame
    refuse_duplicates(source.columns, exact=source.sparkSession.conf.get("spark.sql.caseSensitive") == "true")
    identity, plain = message_identity(source, message_id)
    if plain in declared:
        plain = None  # the id is sent as text, and the column as its declared type
    if fields is not None:
        plain = None
    else:
        refuse_other_id(source.columns, message_id)
    nested = frame.select(
        identity.cast("string").alias(MESSAGE_ID),
        _file(frame).alias(_FILE),
        (sql.col(CORRUPT_RECORD) if malformed else sql.lit(None).cast("string")).alias(_MALFORMED),
        sql.struct(*[sql.col(quoted(name)) for name in source.columns]).alias(_EVENT),
    )
    sent_columns = (
        event_columns(source.drop(MESSAGE_ID), declared, f"{_EVENT}.")
        if fields is None
        else field_columns(source, fields, f"{_EVENT}.")
    )
    # If the id's own column is text already, it is not sent twice.
    beside = [one for one in sent_columns if one.column.name != plain]
    # In separate steps, so that Spark computes the sent values once, and the reason once.
    sent = nested.select("*", *[one.value.alias(one.column.staged_as) for one in beside])
    checked = sent.select("*", _reason(beside, of_csv=_is_of_csv(frame)).alias(_REASON))
    reason = sql.col(_REASON)
    rejected = sql.when(
        reason.isNotNull(),
        sql.to_json(
            sql.struct(
                reason.getField("cause").alias("cause"),
                reason.getField("column").alias("column"),
                _kept(reason.getField("value")).alias("value"),
                _kept(sql.col(MESSAGE_ID)).alias("message_id"),
                sql.col(_FILE).alias("file"),
                _kept(sql.coalesce(sql.col(_MALFORMED), sql.to_json(sql.col(_EVENT)))).alias("event"),
            )
        ),
    )
    valid_id = sql.when(reason.isNull(), sql.col(MESSAGE_ID))
    columns = tuple(
        EventColumn(one.column.name, MESSAGE_ID, "text") if one.column.name == plain else one.column
        for one in sent_columns
    )
    staged: list[Column | str] = [one.column.staged_as for one in beside]
    order = row_order(source, keep, fields, f"{_EVENT}.")
    if order is not None:
        staged.append(order.value.alias(ROW_ORDER))
    return PreparedEvents(
        identified=checked.select(
            valid_id.alias(MESSAGE_ID), rejected.alias(REJECTED), sql.col(MESSAGE_ID).alias(GIVEN_ID), sql.col(_EVENT)
        ),
        staged=checked.select(valid_id.alias(MESSAGE_ID), rejected.alias(REJECTED), *staged),
        ids=source.select(identity.cast("string").alias(MESSAGE_ID)),
        columns=columns,
        order=None if order is None else order.column,
    )


def _file(frame: DataFrame) -> Column:
    """Return Spark's expression for the file that a row comes from; null if the rows do not come from files."""
    # Just trying would make pyspark log an error.
    analyzed: Any = frame._jdf.queryExecution().analyzed()  # noqa: SLF001
    there = "_metadata#" in str(analyzed.metadataOutput().mkString(","))
    return file_of(frame).cast("string") if there else sql.lit(None).cast("string")


def _kept(text: Column) -> Column:
    """Return a text that Postgres can store: with NUL characters escaped, and invalid UTF-8 replaced."""
    return sql.replace(sql.make_valid_utf8(text), sql.lit("\0"), sql.lit(r"\u0000"))


def _is_of_csv(frame: DataFrame) -> bool:
    leaves: Any = frame._jdf.queryExecution().analyzed().collectLeaves()  # noqa: SLF001
    return any(str(leaves.apply(number)).rstrip().endswith("] csv") for number in range(leaves.size()))


def _reason(columns: Sequence[SentColumn], *, of_csv: bool) -> Column:
    """Return Spark's expression for why a row cannot be loaded, with the column and its value; null if it can."""

    def because(cause: Column | str, column: str | None = None, value: Column | None = None) -> Column:
        return sql.struct(
            (sql.lit(cause) if isinstance(cause, str) else cause).alias("cause"),
            sql.lit(column).cast("string").alias("column"),
            (sql.lit(None).cast("string") if value is None else sql.left(value, sql.lit(VALUE_CHARACTERS))).alias(
                "value"
            ),
        )

    def not_utf8(where: str, column: str | None = None) -> Column:
        file = sql.coalesce(sql.concat(sql.lit(" of "), sql.col(_FILE)), sql.lit(""))
        return because(sql.concat(sql.lit(f"not UTF-8 in {where}"), file), column)

    identity = sql.col(MESSAGE_ID)
    reason = (
        sql.when(sql.col(_MALFORMED).isNotNull(), because("malformed record"))
        .when(identity.isNull(), because("no message id"))
        .when(identity == "", because("empty message id"))
        .when(~sql.is_valid_utf8(identity), not_utf8("the message id"))
        .when(
            sql.octet_length(identity) > MAX_MESSAGE_ID_BYTES,
            because(f"message id of more than {MAX_MESSAGE_ID_BYTES} bytes"),
        )
        .when(sql.contains(identity, sql.lit("\0")), because("NUL character in the message id"))
    )
    if of_csv:  # Spark reads CR LF as LF, and with mixed line ends, two lines may become one field
        reason = reason.when(sql.rlike(identity, sql.lit(r"[\r\n]")), because("line break in a message id of CSV"))
    for one in columns:
        name = one.column.name
        if one.not_utf8 is not None:
            reason = reason.when(one.not_utf8, not_utf8(f"column {name}", name))
        if one.holds_nul is not None:
            reason = reason.when(one.holds_nul, because("NUL character, which Postgres cannot keep", name))
        if one.unfit is not None:
            why = sql.concat(sql.lit(f"field {name}: "), one.unfit)
            reason = reason.when(one.unfit.isNotNull(), because(why, name, sql.col(one.column.staged_as)))
    return reason


_EVENT = "event"
_FILE = "file"
_MALFORMED = "malformed"
_REASON = "reason"
