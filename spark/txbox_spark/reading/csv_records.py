"""Records of CSV that Spark accepts although it changes a value in them.

Spark's reader drops commas from decimals, and rounds what does not fit. So decimals are read as text, and made here.
"""

from collections.abc import Collection, Mapping

from txbox_spark.reading.columns import AS_IT_WAS, CORRUPT_RECORD, quoted
from txbox_spark.runtime.lazy_imports import Column, DataFrame, StructType, sql, types


def decimals_of(columns: StructType) -> dict[str, "types.DecimalType"]:
    """Return the columns that are decimals."""
    return {field.name: field.dataType for field in columns.fields if isinstance(field.dataType, types.DecimalType)}


def as_text(columns: StructType, names: Collection[str]) -> StructType:
    """Return the columns, some of them as text."""
    text = types.StringType()
    fields = [types.StructField(field.name, text) if field.name in names else field for field in columns.fields]
    return types.StructType(fields)


def checked_records(frame: DataFrame, decimals: Mapping[str, "types.DecimalType"]) -> DataFrame:
    """Make decimals of texts, and mark records of CSV as malformed in which Spark would change a value.

    A record is malformed too if a text does not fit its decimal, and if the last field ends with CR: Spark finds out
    from the first line of a file how lines end, and if the others end with CR LF, the CR would be part of the event.
    ``decimals`` are columns that were read as text, and what they are to be.
    """
    in_file = [sql.col(quoted(name)) for name in frame.columns[: frame.columns.index(CORRUPT_RECORD)]]
    if not in_file:
        return frame
    wrong = sql.endswith(in_file[-1].cast("string"), sql.lit("\r"))
    values = {}
    for name, type_ in decimals.items():
        fits = _fits(sql.col(quoted(name)), type_)
        values[name] = sql.when(fits, sql.col(quoted(name)).try_cast(type_))
        wrong = wrong | (sql.col(quoted(name)).isNotNull() & ~fits)
    # The line itself is not to be had, so this is what it may have been.
    line = sql.when(wrong, sql.to_csv(sql.struct(*in_file), AS_IT_WAS))
    values[CORRUPT_RECORD] = sql.coalesce(sql.col(CORRUPT_RECORD), line)
    return frame.select([values.get(name, sql.col(quoted(name))).alias(name) for name in frame.columns])


def _fits(text: Column, type_: "types.DecimalType") -> Column:
    """Return Spark's expression for whether a text is a decimal that the type holds to its last digit.

    Spark's casts round. So the digits are counted: without an exponent by one pattern, which is fast; with one, by the
    digits between the zeros at both ends, and the power of ten of the last of them.
    """
    room = type_.precision - type_.scale
    plain = rf"^[+-]?(?=\.?[0-9])0*[0-9]{{0,{room}}}(?:\.[0-9]{{0,{type_.scale}}}0*)?\z"
    whole, fraction, exponent = (sql.regexp_extract(text, _WITH_EXPONENT, group) for group in (1, 2, 3))
    from_first = sql.regexp_replace(sql.concat(whole, fraction), "^0+", "")
    digits = sql.regexp_replace(from_first, "0+$", "")
    last = exponent.try_cast("int") - sql.length(fraction) + sql.length(from_first) - sql.length(digits)
    holds = ((digits == "") | (last >= -type_.scale)) & (last + sql.greatest(sql.length(digits), sql.lit(1)) <= room)
    return (
        sql.when(sql.rlike(text, sql.lit(plain)), sql.lit(True))
        .when(sql.rlike(text, sql.lit(_WITH_EXPONENT)), holds)
        .otherwise(sql.lit(False))
    )


# With an exponent of any length, Spark would calculate for ever.
_WITH_EXPONENT = r"^[+-]?(?=\.?[0-9])([0-9]*)(?:\.([0-9]*))?[eE]([+-]?[0-9]{1,4})\z"
