"""asyncpg's statements: with parameters $1, $2, …, and values that are sent in binary, by the types of Postgres.

psycopg says of each value which type it has; Postgres converts it to what the statement casts it to. asyncpg asks
Postgres which type a parameter has, and then takes no other value: no text for an array, no text for a number. So here
each parameter is cast to the type of its value first::

    INSERT … SELECT %(subscriber_id)s::text, … unnest(%(message_ids)s::text[])       psycopg
    INSERT … SELECT $1::text::text, … unnest($2::text::text[])                       asyncpg: the array as a literal

A statement has the same values each time, so there are one or two texts of each, which asyncpg prepares.
"""

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any


def translated(sql: str, parameters: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """Return a statement of ours, and its values, for asyncpg.

    Args:
        sql: with ``%(name)s`` for its parameters, and ``%%`` for a percent sign.
        parameters: their values, by name; there may be others.
    """
    text, names = _numbered(sql, tuple((name, _type_of(value)) for name, value in parameters.items()))
    return text, tuple([parameters[name] for name in names])


@lru_cache(maxsize=1024)
def _numbered(sql: str, types: tuple[tuple[str, str], ...]) -> tuple[str, tuple[str, ...]]:
    type_of = dict(types)
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        name = match[1]
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}::{type_of[name]}"

    return _PLACEHOLDER.sub(number, sql), tuple(names)


def _type_of(value: Any) -> str:
    if isinstance(value, list):
        element = next((one for one in value if one is not None), None)
        return f"{_type_of(element)}[]"
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "text")


_PLACEHOLDER = re.compile(r"%%|%\((\w+)\)s")

_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),  # before int, which it is too
    (int, "bigint"),
    (float, "double precision"),
    (bytes, "bytea"),
    (datetime, "timestamptz"),
    (timedelta, "interval"),
)
"""The others are sent as text: None, too, as null has no type."""
