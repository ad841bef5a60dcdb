"""Maps Spark's types to Postgres's, so that every column of an event arrives unchanged.

Most types are sent unchanged. A type that Spark, Postgres or the writer does not support is sent as text that Postgres
parses as the column's type: arrays as array literals, structs and maps as JSON, binary as ``\\x`` and hexadecimal
digits, and columns whose type the caller declares (``uuid``, ``jsonb``, …).
"""

import functools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from txbox import InvalidConfiguration
from txbox_spark.runtime.lazy_imports import Column, DataFrame, DataType, sql, types

CORRUPT_RECORD = "_corrupt_record"
"""The column with the text of a line that could not be read; null for all other lines."""

AS_IT_WAS = {"escape": '"', "ignoreLeadingWhiteSpace": "false", "ignoreTrailingWhiteSpace": "false"}
"""Options with which Spark writes a CSV record exactly as it was."""

MESSAGE_ID = "message_id"

MAX_NAME_BYTES = 63
"""Postgres silently truncates longer names."""


@dataclass(frozen=True, slots=True)
class EventColumn:
    name: str  # as in the source
    staged_as: str
    """The name it is sent under, which needs no quotes; ``message_id`` if it is the id, which is not sent twice."""
    postgres_type: str


@dataclass(frozen=True, slots=True)
class SentColumn:
    """How one column of the source is sent, as Spark expressions."""

    column: EventColumn
    value: Column  # what is sent
    holds_nul: Column | None  # whether the sent column, by its ``staged_as``, holds a NUL character; None if it cannot
    not_utf8: Column | None  # whether a text in the value has invalid UTF-8; None if it contains no text
    unfit: Column | None = None  # why the sent text does not fit its field's type; null, or None, if it fits


def event_columns(frame: DataFrame, declared: Mapping[str, str], path: str) -> tuple[SentColumn, ...]:
    """Return how the columns of a source are sent.

    ``declared`` has the Postgres types of columns whose Spark type does not say enough. ``path`` is the prefix of a
    column's name that reaches its value.

    Raises:
        InvalidConfiguration: a column cannot be sent, or a declared column does not exist.
    """
    refuse_names([field.name for field in frame.schema.fields], declared)
    sent = []
    for number, field in enumerate(frame.schema.fields):
        original = sql.col(f"{path}{quoted(field.name)}")
        postgres_type, value, text = _sent(field.name, field.dataType, original, declared.get(field.name))
        holds_nul = _holds_nul(sql.col(f"c{number}"), postgres_type) if text else None
        not_utf8 = _not_utf8(field.dataType, original)
        sent.append(SentColumn(EventColumn(field.name, f"c{number}", postgres_type), value, holds_nul, not_utf8))
    return tuple(sent)


def refuse_names(names: Sequence[str], declared: Mapping[str, str]) -> None:
    """Raise ``InvalidConfiguration`` if Postgres refuses a name, or a type is declared for a column that is missing."""
    if unknown := [name for name in declared if name not in names]:
        raise InvalidConfiguration(
            f"column_types names {unknown[0]!r}, which is no column of the events: {', '.join(names[:20])}"
            + (", …" if len(names) > 20 else "")
        )
    for name in names:
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES or "\0" in name:
            raise InvalidConfiguration(f"column {name!r}: Postgres takes names of 1 to 63 bytes; rename it")
        if name in _SYSTEM_COLUMNS:
            raise InvalidConfiguration(f"column {name!r}: Postgres has its own of that name; rename it")


def as_text(name: str, type_: DataType, value: Column, postgres_type: str) -> Column:
    """Return a value as text that Postgres parses as this type; a text stays as it is."""
    if postgres_type.lower() in ("json", "jsonb") and isinstance(type_, types.ArrayType):
        return _as_json(value)
    return _literal(name, type_, value)


def text_checks(text: Column, postgres_type: str, type_: DataType, value: Column) -> tuple[Column, Column | None]:
    """Return whether a sent text holds a NUL character, and whether the value has invalid UTF-8."""
    return _holds_nul(text, postgres_type), _not_utf8(type_, value)


def types_as_wanted(frame: DataFrame, wanted: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the columns that can be declared with the Postgres types in ``wanted``, and the types of all columns.

    Texts and arrays can be declared, because Postgres parses them as any declared type. Others keep their types.
    """
    own = {field.name: _postgres_type(field.name, field.dataType) for field in frame.schema.fields}
    declared = {
        name: wanted[name]
        for name, type_ in own.items()
        if (type_ == "text" or type_.endswith("[]"))
        and wanted.get(name, type_) != type_
        and _TYPE_NAME.fullmatch(wanted[name])
    }
    return declared, {**own, **declared}


def refuse_duplicates(names: Iterable[str], *, exact: bool = False) -> None:
    """Raise ``InvalidConfiguration`` if two columns have the same name; ``exact`` means that case matters."""
    first: dict[str, str] = {}
    for name in names:
        key = name if exact else name.lower()
        if key in first:
            raise InvalidConfiguration(f"the events have two columns named {first[key]!r} and {name!r}; rename one")
        first[key] = name


def refuse_other_id(names: Iterable[str], message_id: str) -> None:
    """Raise ``InvalidConfiguration`` if a column is named ``message_id`` and is not the id."""
    if message_id != MESSAGE_ID and MESSAGE_ID in names:
        raise InvalidConfiguration(
            f"the events have a column named {MESSAGE_ID}, which is not the id; rename it, or load it as the id"
        )


def _holds_nul(value: Column, postgres_type: str) -> Column:
    """Return whether a text holds a NUL character; Postgres refuses it in text, and as ``\\u0000`` in jsonb."""
    raw = sql.contains(value, sql.lit("\0"))
    if postgres_type.lower() != "jsonb":
        return raw
    # After another backslash, \u0000 is just six characters of text.
    return raw | (sql.contains(value, sql.lit(r"\u0000")) & value.rlike(r"(?<!\\)(\\\\)*\\u0000"))


def _not_utf8(type_: DataType, value: Column) -> Column | None:
    """Return whether any text in a value is invalid UTF-8; None if there is no text in it.

    Spark keeps such bytes. Java's functions would replace them with U+FFFD.
    """
    match type_:
        case types.StringType():
            return ~sql.is_valid_utf8(value)
        case types.ArrayType():
            if _not_utf8(type_.elementType, value) is None:
                return None
            return sql.exists(value, lambda one: cast("Column", _not_utf8(type_.elementType, one)))
        case types.MapType():
            parts = [(type_.keyType, sql.map_keys(value)), (type_.valueType, sql.map_values(value))]
            return _either(_not_utf8(types.ArrayType(part), array) for part, array in parts)
        case types.StructType():
            return _either(_not_utf8(field.dataType, value.getField(field.name)) for field in type_.fields)
    return None


def _either(conditions: Iterable[Column | None]) -> Column | None:
    there = [one for one in conditions if one is not None]
    return functools.reduce(operator.or_, there) if there else None


def quoted(name: str) -> str:
    """Return a column's name, quoted for Spark's expressions."""
    return f"`{name.replace('`', '``')}`"


def dates_as_text(frame: DataFrame) -> DataFrame:
    """Return the frame with dates and times as text.

    JDBC uses the Julian calendar before 1582, and the JVM's time zone. Days of that October, moments before zones had
    whole minutes, and local times that the zone skips would arrive changed.
    """
    spelled = (types.DateType, types.TimestampType, types.TimestampNTZType)
    return frame.select(
        [
            _literal(field.name, field.dataType, sql.col(quoted(field.name))).alias(field.name)
            if isinstance(field.dataType, spelled)
            else sql.col(quoted(field.name))
            for field in frame.schema.fields
        ]
    )


def _sent(name: str, type_: DataType, value: Column, declared: str | None) -> tuple[str, Column, bool]:
    """Return the Postgres type, the expression to send, and whether it is text that may hold a NUL character."""
    postgres_type = column_type(name, type_, declared)
    if declared is not None:
        return declared, as_text(name, type_, value, declared), True
    match type_:
        case types.ArrayType() | types.StructType() | types.MapType() | types.VariantType() | types.BinaryType():
            return postgres_type, _literal(name, type_, value), True
        case types.StringType() | types.CharType() | types.VarcharType():
            return postgres_type, value.cast("string"), True
        case types.NullType() | types.ByteType():
            return postgres_type, value.cast("string" if postgres_type == "text" else postgres_type), False
    return postgres_type, value, False


def column_type(name: str, type_: DataType, declared: str | None) -> str:
    """Return the Postgres type of a column; raise ``InvalidConfiguration`` if it has none."""
    if declared is None:
        return _postgres_type(name, type_)
    if not _TYPE_NAME.fullmatch(declared):
        raise InvalidConfiguration(f"column {name!r}: {declared!r} is not the name of a Postgres type")
    return declared


def _postgres_type(name: str, type_: DataType) -> str:
    match type_:
        case types.ArrayType():
            element = _postgres_type(name, type_.elementType)
            return element if element == "jsonb" else f"{element}[]"
        case types.StructType() | types.MapType() | types.VariantType():
            return "jsonb"
        case types.DecimalType():
            return f"numeric({type_.precision},{type_.scale})"
        case types.StringType() | types.CharType() | types.VarcharType():
            return "text"
    if (postgres_type := _POSTGRES_TYPES.get(type_.typeName())) is None:
        raise InvalidConfiguration(
            f"column {name!r} is of type {type_.simpleString()}, which has no counterpart in Postgres; cast it"
        )
    return postgres_type


def _literal(name: str, type_: DataType, value: Column) -> Column:
    """Return a value as text that Postgres parses as the same value."""
    match type_:
        case types.BinaryType():
            return sql.concat(sql.lit("\\x"), sql.hex(value))
        case types.StructType() | types.MapType() | types.VariantType():
            return _as_json(value)
        case types.ArrayType() if _postgres_type(name, type_) == "jsonb":
            return _as_json(value)
        case types.ArrayType():
            return _array_literal(name, type_.elementType, value)
        case types.TimestampType():
            return _in_utc(value)
    return value.cast("string")


def _in_utc(value: Column) -> Column:
    """Return a timestamp as text in UTC.

    Spark writes a timestamp in the session's time zone and leaves the zone out. Only UTC is safe: other zones have
    times of day twice, and once had offsets with seconds.
    """
    epoch = sql.lit("1970-01-01 00:00:00").cast("timestamp_ntz")
    return sql.concat(sql.timestamp_add("MICROSECOND", sql.unix_micros(value), epoch).cast("string"), sql.lit("Z"))


def _as_json(value: Column) -> Column:
    """Return a value as JSON that keeps nulls and microseconds."""
    options = {
        "ignoreNullFields": "false",
        "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
        "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
        "timeZone": "UTC",
    }
    return sql.to_json(value, options)


def _array_literal(name: str, element: DataType, value: Column) -> Column:
    """Return an array as a Postgres literal with quoted elements, so that none is read as NULL or a brace.

    https://www.postgresql.org/docs/current/arrays.html#ARRAYS-IO
    """

    def written(one: Column) -> Column:
        text = _literal(name, element, one)
        if not isinstance(element, types.ArrayType):
            escaped = sql.regexp_replace(text, r'(["\\])', r"\\$1")
            text = sql.concat(sql.lit('"'), escaped, sql.lit('"'))
        return sql.coalesce(text, sql.lit("NULL"))

    return sql.concat(sql.lit("{"), sql.array_join(sql.transform(value, written), ","), sql.lit("}"))


_SYSTEM_COLUMNS = ("tableoid", "xmin", "cmin", "xmax", "cmax", "ctid")

_POSTGRES_TYPES = {
    "void": "text",
    "binary": "bytea",
    "byte": "smallint",
    "short": "smallint",
    "integer": "integer",
    "long": "bigint",
    "float": "real",
    "double": "double precision",
    "boolean": "boolean",
    "date": "date",
    "timestamp": "timestamp with time zone",
    "timestamp_ntz": "timestamp without time zone",
}

_TYPE_NAME = re.compile(r"[A-Za-z_][\w$]*(?:[ .][A-Za-z_][\w$]*)*(?: ?\(\d+(?:, ?-?\d+)?\))?(?: [a-z ]+)?(?:\[\])*")
"""What may become part of a CREATE TABLE: words, with an optional schema, length and brackets."""
