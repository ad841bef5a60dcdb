"""Rows: the values of an effect's fields in a message's body, or why the body cannot be read."""

import json
from collections.abc import Callable, Mapping
from json.decoder import scanstring  # type: ignore[attr-defined] # documented nowhere, and stable since Python 2.7
from typing import Any

from txbox.effects.field_types import FieldType, refuse_constant
from txbox.effects.fields import Field
from txbox.errors import MalformedMessage
from txbox.messages.message import Message

Row = tuple[str | None, ...]
"""The text of each field's value, as its type accepts it; None: null."""


class RowReader:
    def __init__(self, fields: Mapping[str, Field]) -> None:
        """Take the fields by name; a row's values are in their order."""
        self._readers = [_field_reader(name, one) for name, one in fields.items()]

    def read(self, message: Message) -> Row:
        """Return the row of a message.

        Raises:
            MalformedMessage: the body is not one JSON object in UTF-8, or a value does not fit its field's type. The
                text names the field, not the value.
        """
        try:
            text = message.body.decode()
            document = _parsed(text)
        except UnicodeDecodeError as error:
            raise MalformedMessage(f"the body of message {message.id} is not UTF-8: {error.reason}") from error
        except (ValueError, RecursionError) as error:
            what = f"{error.msg}, character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise MalformedMessage(f"the body of message {message.id} is not JSON: {what}") from error
        if type(document) is not dict:
            raise MalformedMessage(f"the body of message {message.id} is not a JSON object")
        try:
            return tuple([read(document, text) for read in self._readers])
        except _Unfit as error:
            raise MalformedMessage(f"message {message.id}: {error}") from None


def _parsed(text: str) -> Any:
    """Return what ``JSONDecoder.decode`` returns, or raise what it raises, in half the time.

    That method searches for leading and trailing blanks with two regular expressions, for each message.
    """
    if text[:1] == "{":
        document, end = _DECODER.raw_decode(text)
        if end == len(text):
            return document
    return _DECODER.decode(text)


class _Unfit(Exception):
    """A value does not fit its field's type."""


def _field_reader(name: str, one: Field) -> Callable[[dict[str, Any], str], str | None]:
    path, of, default = one.path(name), one.of, one.default
    accepts = of.checker()
    *parents, last = path
    number_range = of.whole_numbers
    takes_any_text = of.kind == "text"

    def read(document: dict[str, Any], text: str) -> str | None:
        value: Any = document
        for parent in parents:
            value = value.get(parent)
            if value is None:
                break
            if type(value) is not dict:
                raise _Unfit(f"field {name}: {parent} is not an object")
        else:
            value = value.get(last)
        if value is None:
            if one.required:
                raise _Unfit(f"field {name} has no value, and is required")
            return default
        if number_range is not None and type(value) is int:  # the usual case of numbers
            if not number_range[0] <= value <= number_range[1]:
                raise _Unfit(f"field {name} is beyond {of.name}")
            return str(value)
        written = value if type(value) is str else _written(value, text, path, of)
        if not accepts(written):
            raise _Unfit(f"field {name} is not {'text that Postgres can keep' if takes_any_text else of.name}")
        return written

    return read


class _Number(str):
    """A number with a fraction or an exponent, as written."""

    __slots__ = ()


def _written(value: Any, text: str, path: tuple[str, ...], of: FieldType) -> str:
    """Return a value's JSON as written in the text."""
    if type(value) is _Number:
        return str(value)
    if value is True:
        return "true"
    if value is False:
        return "false"
    if type(value) is int and not of.quoted:
        return str(value)
    start, end = 0, len(text)
    for name in path:
        start, end = _member(text, start, name)
    return text[start:end]


def _member(text: str, start: int, wanted: str) -> tuple[int, int]:
    """Return where the value of an object's member is written; of several with one name, the last."""
    found = (start, start)
    at = _skip(text, text.index("{", start) + 1)
    while text[at] != "}":
        name, at = scanstring(text, at + 1, True)
        begin = _skip(text, _skip(text, at) + 1)
        _, end = _DECODER.raw_decode(text, begin)
        if name == wanted:
            found = (begin, end)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _skip(text: str, at: int) -> int:
    while text[at] in " \t\n\r":
        at += 1
    return at


_DECODER = json.JSONDecoder(parse_float=_Number, parse_constant=refuse_constant)
