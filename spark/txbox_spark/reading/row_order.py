"""Which of several rows with one message id is taken: any, or the latest or the earliest by a column."""

from collections.abc import Mapping

from txbox import InvalidConfiguration
from txbox.effects import Field
from txbox_spark.reading.columns import EventColumn, quoted
from txbox_spark.runtime.lazy_imports import Column, DataFrame, DataType, sql, types

ANY, LATEST, EARLIEST = "any", "latest:", "earliest:"

ROW_ORDER = "txbox_order"
"""The column by which rows with one id are ordered, where that is asked for."""

ORDER_COLUMN = EventColumn(ROW_ORDER, ROW_ORDER, "numeric(38,6)")
"""The same in a staging table."""


def is_known(keep: str) -> bool:
    """Whether it is written as one of the three."""
    return keep == ANY or any(keep.startswith(one) and keep != one for one in (LATEST, EARLIEST))


def is_latest(keep: str) -> bool:
    """Whether the latest row is taken."""
    return keep.startswith(LATEST)


def row_order(frame: DataFrame, keep: str, fields: Mapping[str, Field] | None, path: str) -> Column | None:
    """Return what rows with one id are ordered by, as a decimal; None: they are not.

    Args:
        frame: the source.
        keep: as in ``LoadOptions``.
        fields: of the effect, if it has any: texts are ordered by the type of their field.
        path: is put before a column's name to reach its value.

    Raises:
        InvalidConfiguration: there is no such column, or it has no order in time.
    """
    if keep == ANY:
        return None
    name = keep.partition(":")[2]
    if name not in frame.columns:
        raise InvalidConfiguration(
            f"keep {keep!r}: the events have no column {name}; they have {', '.join(frame.columns[:20])}"
        )
    value, type_ = sql.col(f"{path}{quoted(name)}"), frame.schema[name].dataType
    if isinstance(type_, types.StringType) and fields is not None and (field := fields.get(name)) is not None:
        value, type_ = _typed(value, field)
    return _as_decimal(keep, value, type_)


def _typed(text: Column, field: Field) -> tuple[Column, DataType]:
    """Return a text as its field's type; null where it is not of that type, for which the row is rejected."""
    kind = field.of.kind
    if kind == "date":
        return text.try_cast("date"), types.DateType()
    if kind.startswith("timestamp"):
        return text.try_cast("timestamp"), types.TimestampType()
    if kind in ("smallint", "integer", "bigint", "numeric", "double precision"):
        return text.try_cast("decimal(38,6)"), types.DecimalType(38, 6)
    return text, types.StringType()


def _as_decimal(keep: str, value: Column, type_: DataType) -> Column:
    match type_:
        case types.TimestampType():
            value = sql.unix_micros(value)
        case types.TimestampNTZType():
            value = sql.unix_micros(value.cast("timestamp"))
        case types.DateType():
            value = sql.unix_date(value)
        case types.NumericType():
            pass
        case _:
            raise InvalidConfiguration(
                f"keep {keep!r} is of type {type_.simpleString()}; it must be a number, a date or a time: cast it, or "
                "name its type among the fields"
            )
    return value.try_cast("decimal(38,6)")
