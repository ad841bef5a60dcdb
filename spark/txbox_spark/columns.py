"""From Spark's types to Postgres's: how every column of an event travels, and arrives unchanged.

Most types travel as what they are. What one side or the road between does not know travels as text that Postgres
reads as the column's type: arrays as array literals, structs and maps as JSON, binary as ``\\x`` and hexadecimal
digits, and whatever the caller has declared (``uuid``, ``jsonb``, …).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from txbox import InvalidConfiguration

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = ["MAX_NAME_BYTES", "EventColumn", "event_columns", "holds_nul"]

MAX_NAME_BYTES = 63
"""What Postgres keeps of a name; a longer one would be cut without a word."""


@dataclass(frozen=True, slots=True)
class EventColumn:
    """One column of the relation ``fresh_event``.

    Attributes:
        name: its name, the source's.
        staged_as: its name on the way, which needs no quotes anywhere.
        postgres_type: its type in Postgres.
    """

    name: str
    staged_as: str
    postgres_type: str


@dataclass(frozen=True, slots=True)
class Travelling:
    """One column of the source on its way: as what it arrives, and how it is sent.

    Attributes:
        column: what ``fresh_event`` has.
        value: Spark's expression for what is sent.
        text: whether that is text, in which a NUL character would be fatal.
    """

    column: EventColumn
    value: "Column"
    text: bool


def event_columns(frame: "DataFrame", declared: Mapping[str, str], path: str) -> tuple[Travelling, ...]:
    """Decide how the columns of a source travel.

    Args:
        frame: the source.
        declared: Postgres types of columns, where Spark's own type does not say enough.
        path: what to put before a column's name to reach its value.

    Raises:
        InvalidConfiguration: a column cannot travel, or something is declared that is not there.
    """
    from pyspark.sql import functions as sql

    names = [field.name for field in frame.schema.fields]
    if unknown := [name for name in declared if name not in names]:
        raise InvalidConfiguration(
            f"column_types names {unknown[0]!r}, which is no column of the events: {_list(names)}"
        )
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidConfiguration(f"the events have two columns named {min(twice)!r}; rename one")
    travelling = []
    for number, field in enumerate(frame.schema.fields):
        if not 0 < len(field.name.encode()) <= MAX_NAME_BYTES or "\0" in field.name:
            raise InvalidConfiguration(f"column {field.name!r}: Postgres takes names of 1 to 63 bytes; rename it")
        value = sql.col(f"{path}{quoted(field.name)}")
        postgres_type, value, text = _travel(field.name, field.dataType, value, declared.get(field.name))
        travelling.append(Travelling(EventColumn(field.name, f"c{number}", postgres_type), value, text))
    return tuple(travelling)


def holds_nul(value: "Column") -> "Column":
    """Whether a text holds the character that Postgres's text cannot, raw or as JSON's ``\\u0000``."""
    from pyspark.sql import functions as sql

    escaped = sql.contains(value, sql.lit(r"\u0000")) & value.rlike(r"(?<!\\)(\\\\)*\\u0000")
    return sql.contains(value, sql.lit("\0")) | escaped


def quoted(name: str) -> str:
    """Return a column's name as Spark's expressions take it."""
    return f"`{name.replace('`', '``')}`"


def _travel(name: str, type_: "DataType", value: "Column", declared: str | None) -> tuple[str, "Column", bool]:
    """Return the Postgres type, the expression to send, and whether that is text."""
    from pyspark.sql import types

    if declared is not None:
        if not _TYPE_NAME.fullmatch(declared):
            raise InvalidConfiguration(f"column {name!r}: {declared!r} is not the name of a Postgres type")
        return declared, _literal(name, type_, value), True
    match type_:
        case types.StringType() | types.CharType() | types.VarcharType():
            return "text", value.cast("string"), True
        case types.NullType():
            return "text", value.cast("string"), False
        case types.DecimalType():
            return f"numeric({type_.precision},{type_.scale})", value, False
        case types.ByteType():
            return "smallint", value.cast("smallint"), False
        case types.ArrayType() | types.StructType() | types.MapType() | types.VariantType() | types.BinaryType():
            return _array_type(type_), _literal(name, type_, value), True
    if (postgres_type := _AS_THEY_ARE.get(type_.typeName())) is None:
        raise InvalidConfiguration(
            f"column {name!r} is of type {type_.simpleString()}, which has no counterpart in Postgres; cast it"
        )
    return postgres_type, value, False


def _array_type(type_: "DataType") -> str:
    from pyspark.sql import types

    match type_:
        case types.ArrayType():
            element = _array_type(type_.elementType)
            return element if element == "jsonb" else f"{element}[]"
        case types.StructType() | types.MapType() | types.VariantType():
            return "jsonb"
        case types.BinaryType():
            return "bytea"
        case types.DecimalType():
            return f"numeric({type_.precision},{type_.scale})"
        case types.ByteType():
            return "smallint"
    return _AS_THEY_ARE.get(type_.typeName(), "text")


def _literal(name: str, type_: "DataType", value: "Column") -> "Column":
    """Return a value as text that Postgres reads back as the same value."""
    from pyspark.sql import functions as sql
    from pyspark.sql import types

    match type_:
        case types.BinaryType():
            return sql.concat(sql.lit("\\x"), sql.hex(value))
        case types.StructType() | types.MapType() | types.VariantType():
            return sql.to_json(value, {"ignoreNullFields": "false"})
        case types.ArrayType() if _array_type(type_) == "jsonb":
            return sql.to_json(value, {"ignoreNullFields": "false"})
        case types.ArrayType():
            return _array_literal(name, type_, value)
        case types.TimestampType():
            # Spark writes a timestamp in the session's time zone and leaves the zone out.
            return sql.date_format(value, "yyyy-MM-dd HH:mm:ss.SSSSSSXXX")
    return value.cast("string")


def _array_literal(name: str, type_: "DataType", value: "Column") -> "Column":
    """Return an array as Postgres writes it: elements in quotes, so that none is taken for NULL or a brace.

    https://www.postgresql.org/docs/current/arrays.html#ARRAYS-IO
    """
    from pyspark.sql import functions as sql
    from pyspark.sql import types

    assert isinstance(type_, types.ArrayType)  # noqa: S101 - for the type checker
    element = type_.elementType

    def written(one: "Column") -> "Column":
        text = _literal(name, element, one)
        if not isinstance(element, types.ArrayType):
            escaped = sql.regexp_replace(text, r'(["\\])', r"\\$1")
            text = sql.concat(sql.lit('"'), escaped, sql.lit('"'))
        return sql.coalesce(text, sql.lit("NULL"))

    return sql.concat(sql.lit("{"), sql.array_join(sql.transform(value, written), ","), sql.lit("}"))


def _list(names: list[str]) -> str:
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")


_AS_THEY_ARE = {
    "string": "text",
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
"""Spark's types that both roads carry as what they are."""

# It becomes part of a CREATE TABLE: words, perhaps with a schema, a length, brackets.
_TYPE_NAME = re.compile(r"[A-Za-z_][\w$]*(?:[ .][A-Za-z_][\w$]*)*(?: ?\(\d+(?:, ?-?\d+)?\))?(?: [a-z ]+)?(?:\[\])*")
