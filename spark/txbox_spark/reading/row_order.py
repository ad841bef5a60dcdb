"""Decides which of several rows with the same message id to take: any, or the latest or earliest by a column."""

from collections.abc import Mapping
from typing import NamedTuple

from txbox import InvalidConfiguration
from txbox.effects import Field
from txbox.effects.field_types import NUMBER
from txbox_spark.reading.columns import EventColumn, quoted
from txbox_spark.runtime.lazy_imports import Column, DataFrame, DataType, sql, types

ANY, LATEST, EARLIEST = "any", "latest:", "earliest:"

ROW_ORDER = "txbox_order"
"""The column that orders rows with the same id, if ``keep`` asks for it."""


class RowOrder(NamedTuple):
    """What rows with the same id are ordered by: the order is the same in Spark, in Arrow and in Postgres."""

    column: EventColumn  # in a staging table
    value: Column  # in Spark; null comes last


def is_known(keep: str) -> bool:
    """Return whether ``keep`` has one of the three forms."""
    return keep == ANY or any(keep.startswith(one) and keep != one for one in (LATEST, EARLIEST))


def is_latest(keep: str) -> bool:
    return keep.startswith(LATEST)


def row_order(frame: DataFrame, keep: str, fields: Mapping[str, Field] | None, path: str) -> RowOrder | None:
    """Return what rows with the same id are ordered by, to the last digit of the column's type; None for ``ANY``.

    Args:
        frame: the source.
        keep: as in ``LoadOptions``.
        fields: the effect's fields, if it has any; texts are ordered by the type of their field.
        path: the prefix of a column's name that reaches its value.

    Raises:
        InvalidConfiguration: the column does not exist, or its type has no usable order.
    """
    if keep == ANY:
        return None
    name = keep.partition(":")[2]
    if name not in frame.columns:
        raise InvalidConfiguration(
            f"keep {keep!r}: the events have no column {name}; they have {', '.join(frame.columns[:20])}"
        )
    value, type_ = sql.col(f"{path}{quoted(name)}"), frame.schema[name].dataType
    ordered = None
    if not isinstance(type_, types.StringType):
        ordered = _ordered(value, type_)
    elif fields is not None and (field := fields.get(name)) is not None:
        ordered = _ordered_text(value, field.of.kind)
    if ordered is None:
        raise InvalidConfiguration(
            f"keep {keep!r} is of type {type_.simpleString()}; it must be a number, a date or a time: cast it, or "
            "name its type among the fields"
        )
    postgres_type, key = ordered
    return RowOrder(EventColumn(ROW_ORDER, ROW_ORDER, postgres_type), key)


def _ordered(value: Column, type_: DataType) -> tuple[str, Column] | None:
    """Return the Postgres type and the expression to order a value by; None if the type has no order."""
    match type_:
        case types.TimestampType():
            return "bigint", sql.unix_micros(value)
        case types.TimestampNTZType():
            return "bigint", _local_micros(value)
        case types.DateType():
            return "integer", sql.unix_date(value)
        case types.DecimalType():
            return f"numeric({type_.precision},{type_.scale})", value
        case types.IntegralType():
            return "bigint", value.cast("bigint")
        case types.FractionalType():
            number = value.cast("double")
            return "double precision", sql.when(~sql.isnan(number), number)  # Arrow and Spark sort NaN differently
    return None


def _ordered_text(text: Column, kind: str) -> tuple[str, Column] | None:
    """Return the same for a text that a field of this kind holds.

    The expression is null if the text does not fit the field; the row is then rejected.
    """
    match kind:
        case "date":
            return _ordered(text.try_cast("date"), types.DateType())
        case "timestamptz":
            return _NANOS_TYPE, _nanos(text, sql.unix_micros(text.try_cast("timestamp")))
        case "timestamp without time zone":
            return _NANOS_TYPE, _nanos(text, _local_micros(text.try_cast("timestamp_ntz")))
        case "smallint" | "integer" | "bigint":
            return _ordered(text.try_cast("bigint"), types.LongType())
        case "double precision":
            return _ordered(text.try_cast("double"), types.DoubleType())
        case "numeric":
            return 'text COLLATE "C"', _number_key(text)
    return None


def _local_micros(local: Column) -> Column:
    """Return a local time's microseconds since 1970, independent of any time zone.

    Spark's own functions would convert the time to the session's time zone first.
    """
    since = local - sql.lit("1970-01-01 00:00:00").cast("timestamp_ntz")
    return (since.cast("interval second").cast("decimal(19,6)") * 1_000_000).cast("bigint")


def _nanos(text: Column, micros: Column) -> Column:
    """Return the nanoseconds since 1970 of a time as text, whose microseconds Spark has parsed."""
    rest = sql.rpad(sql.regexp_extract(text, r"\.[0-9]{6}([0-9]{1,3})", 1), 3, "0")
    return micros.cast("decimal(19,0)") * 1_000 + rest.cast("int")


def _number_key(text: Column) -> Column:
    """Return a text whose byte order is the order of the numbers that texts hold; Spark's decimals have only 38 digits.

    It starts with 0, 1 or 2 for a number below, at or above zero. The power of ten of the first digit and then the
    digits follow. Below zero, each of those digits is subtracted from 9, and a byte greater than all digits ends them.
    """
    whole = sql.regexp_extract(text, "^[+-]?([0-9]*)", 1)
    written = sql.concat(whole, sql.regexp_extract(text, r"\.([0-9]*)", 1))
    digits = sql.ltrim(written, sql.lit("0"))
    exponent = sql.coalesce(sql.regexp_extract(text, "[eE](.*)$", 1).try_cast("int"), sql.lit(0))
    power = sql.length(whole) - sql.length(written) + sql.length(digits) + exponent + _POWER_OF_ONE
    key = sql.concat(sql.lpad(power.cast("string"), 4, "0"), sql.rtrim(digits, sql.lit("0")))
    below = sql.concat(sql.lit("0"), sql.translate(key, "0123456789", "9876543210"), sql.lit("~"))
    signed = sql.when(sql.startswith(text, sql.lit("-")), below).otherwise(sql.concat(sql.lit("2"), key))
    return sql.when(text.rlike(rf"\A(?:{NUMBER})\z"), sql.when(digits == "", sql.lit("1")).otherwise(signed))


_POWER_OF_ONE = 5_000
"""Greater than any power of ten that ``NUMBER`` accepts, so that each power becomes a four-digit number."""

_NANOS_TYPE = "numeric(38,0)"
