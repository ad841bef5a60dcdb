"""Protects JSON values that Spark's parser would lose or change: those after the first of a text, and large numbers.

If a line has two events, as some services write them (``{"id":1}{"id":2}``), or ends with a comma, or if JSON lines are
read as one document with ``multiLine``, Spark takes the first value and silently drops the rest. Workers park such a
message. Here, nothing of such files is loaded.

Spark infers one type for all numbers of a column. If no decimal can hold one of them, because it needs more than 38
digits, all become floating-point numbers: 9007199254740993 becomes 9007199254740992. So we read numbers as decimals,
and as floating-point numbers only if that changes none of them.
"""

import sys
from collections.abc import Callable, Mapping
from functools import reduce
from typing import cast

from txbox_spark.reading.columns import quoted
from txbox_spark.reading.errors import SourceError
from txbox_spark.reading.files.encodings import LINE
from txbox_spark.reading.files.file_listing import file_of
from txbox_spark.runtime.jobs import changed_settings
from txbox_spark.runtime.lazy_imports import Column, DataFrame, DataType, SparkSession, StructType, sql, types

_MARK = "\ufeff"
_DEPTH = "maxnestingdepth"
_SHOWN = 100


def has_more(text: Column, given: Mapping[str, str]) -> Column:
    """Return whether anything but blanks follows the first JSON value of a text.

    Args:
        text: a line or a document.
        given: options of Spark's reader, some of which allow invalid JSON.
    """
    # True of nearly all lines of flat events: the first "}" is their last byte. The test takes 0.1 microseconds.
    is_flat = sql.startswith(text, sql.lit("{")) & (sql.instr(text, "}") == sql.octet_length(text))
    # What remains is malformed, begins with a byte order mark, or is allowed by an option.
    rest = sql.ltrim(text, sql.lit(_MARK))
    taken = {name.lower(): value for name, value in given.items() if name.lower().startswith(("allow", "max"))}
    is_read = sql.from_json(rest, "array<struct<_: string>>", taken).isNotNull()  # an object, too
    return ~is_flat & ~is_one_value(text) & is_read & ~_is_one(rest, lambda array: _size(array, taken))


def refuse_more(texts: DataFrame, given: Mapping[str, str], *, whole: bool) -> None:
    """Raise ``SourceError`` if one of the texts has more than one value; ``whole`` says that they are documents."""
    found = texts.where(has_more(sql.col(LINE), given))
    first = found.select(file_of(found), sql.left(LINE, sql.lit(_SHOWN))).head()
    if first is None:
        return
    file, begins = first
    if whole:
        raise SourceError(
            f"{file} has more than one JSON document, and multiLine reads the first of a file; if each event is on a "
            "line of its own, leave multiLine out"
        )
    raise SourceError(
        f"{file} has more behind the first JSON value of a line, which would not be read; put each event on a line of "
        f"its own, without commas between them. Such lines in all files: {found.count():,}; one begins with {begins}"
    )


def is_one_value(text: Column) -> Column:
    return _is_one(text, lambda array: sql.json_array_length(array))


def _is_one(text: Column, length: Callable[[Column], Column]) -> Column:
    """Return whether a text is one JSON value, judged by the ``length`` of an array around it.

    If the text itself closes the array with a bracket, another element after it does not change the length.
    """
    alone, before_another = (length(sql.concat(sql.lit("["), text, sql.lit(end))) for end in ("\n]", "\n,0]"))
    closes_nothing = ~sql.contains(text, sql.lit("]"))
    return sql.coalesce((alone == 1) & (closes_nothing | (before_another == 2)), sql.lit(False))


def _size(array: Column, taken: Mapping[str, str]) -> Column:
    depth = taken.get(_DEPTH, "")
    deeper = {_DEPTH: str(int(depth) + 1)} if depth.isdecimal() else {}
    return sql.size(sql.from_json(array, "array<string>", {**taken, **deeper}))


def exact_columns(
    spark: SparkSession,
    found: Callable[[Mapping[str, str]], StructType],
    load: Callable[[StructType], DataFrame],
    given: Mapping[str, str],
) -> StructType:
    """Return the columns of JSON, with decimals instead of floating-point numbers.

    Spark's ``prefersDecimal`` also turns quoted digits into decimals, so that the id "007" would become 7. So its types
    are used only for columns that are floating-point without it.

    Args:
        spark: the Spark session.
        found: finds the columns, given options of Spark's reader.
        load: reads the events with these columns, some of which read numbers as text, with all digits.
        given: options of Spark's reader.

    Raises:
        SourceError: a number would change, because no decimal can hold another number of its column.
    """
    plain = found(given)
    if not _has_floats(plain):
        return plain
    with changed_settings(spark, _NEGATIVE_SCALES):
        decimals = found({**given, "prefersDecimal": "true"})
    columns = cast("StructType", _without_floats(plain, decimals))
    rounded = [field for field in columns.fields if _has_floats(field.dataType)]
    if rounded:
        texts = load(types.StructType([types.StructField(one.name, _floats_as_text(one.dataType)) for one in rounded]))
        changed = [cast("Column", _changed(one.dataType, sql.col(quoted(one.name)))) for one in rounded]
        wrong = texts.select([sql.bool_or(one) for one in changed]).head()
        for field, is_wrong in zip(rounded, wrong or (), strict=True):
            if is_wrong:
                raise SourceError(
                    f"column {field.name} has a number that a decimal of 38 digits does not hold, and as "
                    f"floating-point numbers others in it would change; name its type: "
                    f"--fields '{field.name} text', or a schema"
                )
    return columns


def with_texts_of_numbers(texts: DataFrame, given: Mapping[str, str], columns: StructType) -> DataFrame:
    """Parse JSON with every number as a text, with all its digits.

    When Spark parses JSON in a column, it reads a fraction as Java does. So every number is put into quotes first.

    Args:
        texts: lines or documents, in the column ``value``.
        given: options of Spark's reader.
        columns: the columns to parse, numbers as text.
    """
    quoted_numbers = sql.regexp_replace("value", _UP_TO_NUMBER, '$1"$2"')
    # Parse an array of records, because a line or a document may be one.
    records = sql.from_json(quoted_numbers, types.ArrayType(columns), dict(given))
    return texts.select(sql.explode(records).alias("record")).select("record.*")


def _has_floats(type_: DataType) -> bool:
    match type_:
        case types.StructType():
            return any(_has_floats(field.dataType) for field in type_.fields)
        case types.ArrayType():
            return _has_floats(type_.elementType)
    return isinstance(type_, types.DoubleType)


def _without_floats(plain: DataType, decimals: DataType) -> DataType:
    """Replace each floating-point type in ``plain`` with the type in the same place of ``decimals``."""
    match plain, decimals:
        case types.StructType(), types.StructType():
            others = {field.name: field.dataType for field in decimals.fields}
            return types.StructType(
                [
                    types.StructField(
                        field.name, _without_floats(field.dataType, others.get(field.name, field.dataType))
                    )
                    for field in plain.fields
                ]
            )
        case types.ArrayType(), types.ArrayType():
            return types.ArrayType(_without_floats(plain.elementType, decimals.elementType))
        case types.DoubleType(), types.DecimalType():
            whole = types.DecimalType(decimals.precision - min(decimals.scale, 0), max(decimals.scale, 0))
            return whole if whole.precision <= _MOST_DIGITS else plain
    return plain


def _floats_as_text(type_: DataType) -> DataType:
    match type_:
        case types.StructType():
            return types.StructType(
                [types.StructField(one.name, _floats_as_text(one.dataType)) for one in type_.fields]
            )
        case types.ArrayType():
            return types.ArrayType(_floats_as_text(type_.elementType))
        case types.DoubleType():
            return types.StringType()
    return type_


def _changed(type_: DataType, value: Column) -> Column | None:
    """Return whether a number in a value, read as text, would change as ``type_``; None if none can change."""
    match type_:
        case types.StructType():
            parts = [_changed(one.dataType, value.getField(one.name)) for one in type_.fields]
            there = [sql.coalesce(one, sql.lit(False)) for one in parts if one is not None]
            return reduce(lambda some, more: some | more, there) if there else None
        case types.ArrayType():
            if _changed(type_.elementType, value) is None:
                return None
            return sql.exists(value, lambda one: cast("Column", _changed(type_.elementType, one)))
        case types.DoubleType():
            # A floating-point number keeps 15 digits, unless it is too large or too small.
            digits, number = _digits(value), value.try_cast("double")
            is_other = digits != _digits(number.cast("string"))
            at_end = (sql.abs(number) < sql.lit(sys.float_info.min)) | (sql.abs(number) == sql.lit(float("inf")))
            return sql.rlike(value, sql.lit("^-?[0-9]")) & is_other & ((sql.length(digits) > 15) | at_end)
    return None


def _digits(number: Column) -> Column:
    """Return the digits of a number, without zeros at both ends."""
    return sql.regexp_replace(sql.regexp_replace(number, r"[eE].*$|[-.]", ""), "^0+|0+$", "")


_NEGATIVE_SCALES = {"spark.sql.legacy.allowNegativeScaleOfDecimal": "true"}
"""Spark reads 1.5e3 as 15 hundreds, and without this setting it cannot find the columns."""
_MOST_DIGITS = 38
_UP_TO_NUMBER = (
    r"""\G((?:[^"'\d-]|-(?!\d)|"[^"\\]*+(?:\\.[^"\\]*+)*+"|'[^'\\]*+(?:\\.[^'\\]*+)*+')*+)(-?\d[\d.eE+-]*+)"""
)
"""What comes before a number of JSON, including whole texts, and the number; the pattern never backtracks."""
