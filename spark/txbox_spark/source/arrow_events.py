"""Turns a data source's Arrow batches into events as they are sent, as ``event_rows`` does in Spark."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from txbox import InvalidConfiguration
from txbox.effects import Field
from txbox.messages.message import MAX_MESSAGE_ID_BYTES
from txbox_spark.reading.columns import (
    MESSAGE_ID,
    EventColumn,
    column_type,
    refuse_duplicates,
    refuse_names,
    refuse_other_id,
)
from txbox_spark.reading.event_rows import REJECTED
from txbox_spark.reading.fields import way_to
from txbox_spark.reading.identity import refuse_type
from txbox_spark.rejects.remarks import VALUE_CHARACTERS
from txbox_spark.runtime.lazy_imports import DataType, StructType, compute, pyarrow, types
from txbox_spark.source.arrow_text import as_json, literal


@dataclass(frozen=True, slots=True)
class SentField:
    """A column to send, and where its value is in the source's rows."""

    column: EventColumn
    path: tuple[str, ...]  # names, from the source's column to a field within it
    as_json: bool = False  # for an array whose declared type is JSON
    as_it_is: bool = False  # for a number, a boolean or a time, which ``csv_lines`` converts to text
    field: Field | None = None  # the effect's field; None for a column of the source


@dataclass(frozen=True, slots=True)
class ArrowEvents:
    """Turns the rows of one schema into events. It is sent to the executors."""

    source: StructType  # the schema of the rows
    message_id: str  # the column that is the id
    columns: tuple[EventColumn, ...]  # of ``fresh_event``
    sent: tuple[SentField, ...]  # sent besides the id

    @classmethod
    def of(
        cls, source: StructType, message_id: str, declared: Mapping[str, str], fields: Mapping[str, Field] | None
    ) -> Self:
        """Decide how the columns, or the fields of an effect, are sent.

        Raises:
            InvalidConfiguration: a column does not exist, or cannot be sent.
        """
        refuse_duplicates(source.names)
        plain = _plain_id(source, message_id, declared)
        if fields is not None:
            sent = [_field(source, name, one, number) for number, (name, one) in enumerate(fields.items())]
            return cls(source, message_id, tuple(one.column for one in sent), tuple(sent))
        refuse_other_id(source.names, message_id)
        kept = [name for name in source.names if name != MESSAGE_ID]
        refuse_names(kept, declared)
        columns, beside = [], []
        for number, name in enumerate(kept):
            if plain and name == message_id:
                columns.append(EventColumn(name, MESSAGE_ID, "text"))
                continue
            one = _column(name, source[name].dataType, declared.get(name), number)
            columns.append(one.column)
            beside.append(one)
        return cls(source, message_id, tuple(columns), tuple(beside))

    def batch(self, rows: "pyarrow.RecordBatch") -> "pyarrow.RecordBatch":
        """Return rows with ``message_id`` (null if the row is rejected), ``rejected`` (why) and what is sent."""
        reasons = _Reasons(rows.num_rows)
        readable: dict[str, pyarrow.Array] = {}
        not_utf8 = {}
        for name, array in zip(self.source.names, rows.columns, strict=True):
            not_utf8[name] = _not_utf8(array)
            readable[name] = array if not_utf8[name] is None else _without(array, not_utf8[name])
        identity = self._identity(readable[self.message_id])
        reasons.add("not UTF-8 in the message id", not_utf8[self.message_id])
        reasons.add("no message id", identity.is_null())
        reasons.add("empty message id", compute.equal(identity, ""))
        too_long = compute.greater(compute.binary_length(identity), MAX_MESSAGE_ID_BYTES)
        reasons.add(f"message id of more than {MAX_MESSAGE_ID_BYTES} bytes", too_long)
        reasons.add("NUL character in the message id", compute.match_substring(identity, "\0"))
        values = []
        for one in self.sent:
            reasons.add(f"not UTF-8 in column {one.path[0]}", not_utf8[one.path[0]], one.path[0])
            value = self._value(one, readable)
            if not one.as_it_is:
                holds_nul = _holds_nul(value, one.column.postgres_type)
                reasons.add("NUL character, which Postgres cannot keep", holds_nul, one.column.name)
            if one.field is not None:
                reasons.add_all(_unfit(one.column.name, one.field, value), one.column.name)
            values.append(value)
        rejected = self._rejected(reasons, readable, identity, values)
        names = [MESSAGE_ID, REJECTED, *(one.column.staged_as for one in self.sent)]
        valid = compute.if_else(rejected.is_null(), identity, pyarrow.scalar(None, pyarrow.string()))
        return pyarrow.RecordBatch.from_arrays([valid, rejected, *values], names=names)

    def _identity(self, array: "pyarrow.Array") -> "pyarrow.StringArray":
        if isinstance(self.source[self.message_id].dataType, types.DecimalType):  # Arrow writes large ones as 1E+20
            digits = [None if one is None else format(one, "f") for one in array.to_pylist()]
            return pyarrow.array(digits, pyarrow.string())
        return array.cast(pyarrow.string())

    def _value(self, one: SentField, arrays: "Mapping[str, pyarrow.Array]") -> "pyarrow.Array":
        value, type_ = arrays[one.path[0]], self.source[one.path[0]].dataType
        for member in one.path[1:]:
            match type_:
                case types.StructType():
                    value, type_ = compute.struct_field(value, member), type_[member].dataType
                case types.MapType():
                    value, type_ = compute.map_lookup(value, member, "first"), type_.valueType
        if one.as_it_is:
            return value
        text = as_json(value, type_) if one.as_json else literal(value, type_)
        return text if one.field is None or one.field.default is None else text.fill_null(one.field.default)

    def _rejected(
        self,
        reasons: "_Reasons",
        arrays: "Mapping[str, pyarrow.Array]",
        identity: "pyarrow.StringArray",
        values: "Sequence[pyarrow.Array]",
    ) -> "pyarrow.StringArray":
        """Return, for each row, a ``RejectedRow`` as JSON without nulls; null if the row can be loaded."""
        bad = compute.indices_nonzero(reasons.texts.is_valid()).to_pylist()
        if not bad:
            return reasons.texts
        parts = []
        for name, array in arrays.items():
            words = as_json(array.take(pyarrow.array(bad)), self.source[name].dataType).to_pylist()
            parts.append([None if word is None else f"{json.dumps(name, ensure_ascii=False)}:{word}" for word in words])
        found: list[str | None] = [None] * len(reasons.texts)
        texts = {one.column.name: value for one, value in zip(self.sent, values, strict=True) if one.field is not None}
        for number, row in zip(bad, zip(*parts, strict=True), strict=True):
            cause, column = reasons.texts[number].as_py(), reasons.columns[number].as_py()
            value = texts[column][number].as_py() if cause.startswith("field ") else None
            made = {
                "cause": cause,
                "column": column,
                "value": _kept(None if value is None else value[:VALUE_CHARACTERS]),
                "message_id": _kept(identity[number].as_py()),
                "event": "{" + ",".join(filter(None, row)) + "}",
            }
            text = json.dumps({name: one for name, one in made.items() if one is not None}, ensure_ascii=False)
            found[number] = text
        return pyarrow.array(found, pyarrow.string())


def _kept(text: str | None) -> str | None:
    """Return a text that Postgres can store: with NUL characters escaped."""
    return None if text is None else text.replace("\0", r"\u0000")


class _Reasons:
    """Why rows cannot be loaded: the first reason for each row, and the column that it is about."""

    def __init__(self, rows: int) -> None:
        self.texts = pyarrow.nulls(rows, pyarrow.string())
        self.columns = pyarrow.nulls(rows, pyarrow.string())

    def add(self, reason: str, rows: "pyarrow.BooleanArray | None", column: str | None = None) -> None:
        """Add a reason for the rows that are true; None means no row."""
        if rows is not None and compute.any(rows).as_py():
            self.add_all(compute.if_else(rows, pyarrow.scalar(reason), pyarrow.scalar(None, pyarrow.string())), column)

    def add_all(self, reasons: "pyarrow.StringArray | None", column: str | None) -> None:
        """Add each row's reason, unless it is null or the row has one already."""
        if reasons is not None:
            new = compute.and_(self.texts.is_null(), reasons.is_valid())
            self.columns = compute.if_else(new, pyarrow.scalar(column, pyarrow.string()), self.columns)
            self.texts = compute.coalesce(self.texts, reasons)


def _plain_id(source: StructType, message_id: str, declared: Mapping[str, str]) -> bool:
    """Return whether the id's column is the id unchanged, so that it need not be sent twice."""
    if message_id not in source.names:
        raise InvalidConfiguration(
            f"message_id {message_id!r} is no column of the events ({', '.join(source.names[:20])}); a data source "
            "cannot work an expression out, so add it as a column first: "
            "events.withColumn('event_id', expr(…)), and option('message_id', 'event_id')"
        )
    type_ = source[message_id].dataType
    refuse_type(message_id, type_)
    return isinstance(type_, types.StringType) and message_id not in declared


def _column(name: str, type_: DataType, declared: str | None, number: int) -> SentField:
    column = EventColumn(name, f"c{number}", column_type(name, type_, declared))
    json_array = declared is not None and declared.lower() in ("json", "jsonb") and isinstance(type_, types.ArrayType)
    as_it_is = declared is None and isinstance(
        type_, types.NumericType | types.BooleanType | types.DateType | types.TimestampType | types.TimestampNTZType
    )
    return SentField(column, (name,), as_json=json_array, as_it_is=as_it_is)


def _field(source: StructType, name: str, one: Field, number: int) -> SentField:
    _, type_ = way_to(source, name, one)[-1]
    column_type(name, type_, None)  # raises if the type has no counterpart
    json_array = one.of.kind == "jsonb" and isinstance(type_, types.ArrayType)
    return SentField(EventColumn(name, f"c{number}", one.of.name), one.path(name), as_json=json_array, field=one)


def _unfit(name: str, one: Field, texts: "pyarrow.StringArray") -> "pyarrow.StringArray | None":
    """Return why texts do not fit a field, judged as a worker judges them."""
    takes = one.of.checker()
    missing = f"field {name}: no value, and it is required" if one.required else None
    unfit = f"field {name}: not {one.of.name}"
    found = [missing if text is None else None if takes(text) else unfit for text in texts.to_pylist()]
    return pyarrow.array(found, pyarrow.string()) if any(found) else None


def _not_utf8(array: "pyarrow.Array") -> "pyarrow.BooleanArray | None":
    """Return whether any text in each value is invalid UTF-8; None if all are valid. Spark keeps such bytes."""
    if _is_valid(array):
        return None
    return pyarrow.array([not _is_valid(array.take(pyarrow.array([row]))) for row in range(len(array))])


def _is_valid(array: "pyarrow.Array") -> bool:
    try:
        array.validate(full=True)
    except pyarrow.ArrowInvalid:
        return False
    return True


def _without(array: "pyarrow.Array", rows: "pyarrow.BooleanArray") -> "pyarrow.Array":
    """Return the array with these rows set to null."""
    kept: Sequence[int | None] = [None if out else row for row, out in enumerate(rows.to_pylist())]
    return array.take(pyarrow.array(kept, pyarrow.int64()))


def _holds_nul(texts: "pyarrow.StringArray", postgres_type: str) -> "pyarrow.BooleanArray":
    """Return whether a text holds a NUL character; Postgres refuses it in text, and as ``\\u0000`` in jsonb."""
    raw = compute.match_substring(texts, "\0")
    if postgres_type.lower() != "jsonb" or not compute.any(compute.match_substring(texts, r"\u0000")).as_py():
        return raw
    # After another backslash, \u0000 is just six characters of text.
    return compute.or_(raw, compute.match_substring_regex(texts, r"(^|[^\\])(\\\\)*\\u0000"))
