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

from sqlalchemy import Connection

from txbox.errors import InvalidConfiguration


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


def refuse_codecs(connection: Connection) -> None:
    """Refuse a connection on which the host has set codecs for the types of our values; looks once at each.

    They would change what is kept of an id, or what comes back of it.

    Raises:
        InvalidConfiguration: it has some.
    """
    if _LOOKED in connection.info:
        return
    driver: Any = connection.connection.driver_connection
    settings = driver.get_settings()
    names = [
        name
        for name, oid in _OIDS.items()
        if settings.get_data_codec(oid) is not settings.get_data_codec(oid, ignore_custom_codec=True)
    ]
    if names:
        raise InvalidConfiguration(
            f"this connection of asyncpg has a codec of yours for {', '.join(names)}, which changes what txbox keeps "
            "and reads: give txbox an engine without it (set_type_codec on the columns' own types, such as a domain)"
        )
    connection.info[_LOOKED] = True


_LOOKED = "txbox_codecs_looked_at"

_OIDS = {
    "bool": 16,
    "bytea": 17,
    "int8": 20,
    "int4": 23,
    "text": 25,
    "float8": 701,
    "timestamptz": 1184,
    "interval": 1186,
    "text[]": 1009,
    "int8[]": 1016,
    "bytea[]": 1001,
}
"""The types of our values and results, which Postgres numbers the same everywhere."""


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
