"""Turns the fields of a ``SqlEffect`` into Spark expressions that read and refuse what a worker would."""

from collections.abc import Mapping
from itertools import pairwise

from txbox import InvalidConfiguration
from txbox.effects import Field
from txbox.effects.field_types import BAD_ESCAPES, FieldType
from txbox_spark.reading.columns import EventColumn, SentColumn, as_text, quoted, text_checks
from txbox_spark.reading.files.json_values import is_one_value
from txbox_spark.runtime.lazy_imports import Column, DataFrame, DataType, StructType, sql, types


def field_columns(frame: DataFrame, fields: Mapping[str, Field], path: str) -> tuple[SentColumn, ...]:
    """Return how the fields of a source are sent: as the text of their values, with why a value does not fit.

    ``path`` is the prefix of a column's name that reaches its value.

    Raises:
        InvalidConfiguration: the source lacks a field's column.
    """
    sent = []
    for number, (name, one) in enumerate(fields.items()):
        original, type_ = _value(frame, name, one, path)
        staged = f"c{number}"
        value = sql.coalesce(as_text(name, type_, original, one.of.name), sql.lit(one.default))
        holds_nul, not_utf8 = text_checks(sql.col(staged), one.of.name, type_, original)
        sent.append(
            SentColumn(EventColumn(name, staged, one.of.name), value, holds_nul, not_utf8, _unfit(sql.col(staged), one))
        )
    return tuple(sent)


def schema_of(fields: Mapping[str, Field], *others: str) -> str:
    """Return the JSON columns that hold the fields, as Spark DDL: texts, in structs if a field's path is nested."""
    tree: dict[str, object] = dict.fromkeys(others, None)
    for name, one in fields.items():
        at = tree
        *parents, last = one.path(name)
        for parent in parents:
            inner = at.get(parent)
            if not isinstance(inner, dict):  # the path leads into another field's value
                inner = at[parent] = {}
            at = inner
        at.setdefault(last, None)
    return ", ".join(f"{quoted(name)} {_ddl(inner)}" for name, inner in tree.items())


def _ddl(inner: object) -> str:
    if not isinstance(inner, dict):
        return "string"
    return f"struct<{', '.join(f'{quoted(name)}: {_ddl(below)}' for name, below in inner.items())}>"


def _value(frame: DataFrame, name: str, one: Field, path: str) -> tuple[Column, DataType]:
    """Return a field's value and Spark type; raise ``InvalidConfiguration`` if the source lacks it."""
    way = way_to(frame.schema, name, one)
    value = sql.col(f"{path}{quoted(way[0][0])}")
    for (_, parent), (member, _) in pairwise(way):
        value = value.getItem(member) if isinstance(parent, types.MapType) else value.getField(member)
    return value, way[-1][1]


def way_to(source: StructType, name: str, one: Field) -> list[tuple[str, DataType]]:
    """Return the column and the members within it that lead to a field's value, each with its Spark type.

    Raises:
        InvalidConfiguration: the source lacks one of them.
    """
    first, *others = one.path(name)
    if first not in source.names:
        raise InvalidConfiguration(
            f"field {name}: the events have no column {first}; they have {', '.join(source.names[:20])}"
        )
    way = [(first, source[first].dataType)]
    for member in others:
        match way[-1][1]:
            case types.StructType() as parent if member in parent.names:
                way.append((member, parent[member].dataType))
            case types.MapType() as parent:
                way.append((member, parent.valueType))
            case parent:
                raise InvalidConfiguration(f"field {name}: there is no {member} in {parent.simpleString()} of {first}")
    return way


def _unfit(text: Column, one: Field) -> Column:
    """Return why a field's text does not fit; null if it does."""
    named = one.of.name
    takes = _takes(text, one.of)
    name_of = sql.lit(f"not {named}")
    unfit = sql.when(text.isNotNull() & ~sql.coalesce(takes, sql.lit(False)), name_of) if takes is not None else None
    if not one.required:
        return sql.lit(None).cast("string") if unfit is None else unfit
    missing = sql.when(text.isNull(), sql.lit("no value, and it is required"))
    return missing if unfit is None else sql.coalesce(missing, unfit)


def _takes(text: Column, of: FieldType) -> Column | None:
    """Return whether a type accepts a text, as ``FieldType.checker`` does; None if it accepts every text."""
    if of.kind == "text":
        return None
    if of.kind == "jsonb":
        # try_parse_json stops after the first value.
        return sql.try_parse_json(text).isNotNull() & is_one_value(text) & ~text.rlike(BAD_ESCAPES)
    matches = text.rlike(rf"\A(?:{of.pattern})\z")
    if of.whole_numbers is not None:
        least, most = of.whole_numbers
        return matches & text.try_cast("bigint").between(least, most)
    if of.precision is not None:
        return matches & text.try_cast(f"decimal({of.precision},{of.scale})").isNotNull()
    if of.kind == "double precision":
        number = text.try_cast("double")
        lost = (number == 0) & text.rlike("^[^eE]*[1-9]")
        return matches & (sql.abs(number) < sql.lit(float("inf"))) & ~lost
    if of.kind in ("date", "timestamptz", "timestamp without time zone"):
        return matches & sql.left(text, sql.lit(10)).try_cast("date").isNotNull()
    return matches
