"""SQL that gives an effect's statements the relation ``fresh_event``, which depends on the fields."""

import re
from collections.abc import Mapping

from txbox.effects.fields import Field
from txbox.postgres.sql import quote, unescaped

FRESH_EVENT = "fresh_event"
"""The relation with a row for each message that comes for the first time."""


def with_rows(statement: str, fields: Mapping[str, Field]) -> str:
    """Return a statement with ``fresh_event`` as a common table expression in front; its parameters are arrays.

    $1 has the ids, $2 and so on the values of the fields, in their order. The statement takes such an expression.
    """
    names = ", ".join(["message_id", *(unescaped(quote(name)) for name in fields)])
    expression = f"{FRESH_EVENT} ({names}) AS ({_rows(fields)})"
    started = _WITH.match(statement)
    if started is None:
        return f"WITH {expression} {statement}"
    return f"{started[0]} {expression},{statement[started.end() :]}"


def create_table(fields: Mapping[str, Field]) -> str:
    """Return what creates ``fresh_event`` as a table of the transaction."""
    columns = "".join(f", {unescaped(quote(name))} {one.of.name}" for name, one in fields.items())
    return f'CREATE TEMPORARY TABLE {FRESH_EVENT} (message_id text COLLATE "C" NOT NULL{columns}) ON COMMIT DROP'


def fill_table(fields: Mapping[str, Field]) -> str:
    """Return what fills that table; the parameters are those of ``with_rows``."""
    return f"INSERT INTO pg_temp.{FRESH_EVENT} {_rows(fields)}"


def _rows(fields: Mapping[str, Field]) -> str:
    arrays = ["$1::text[]", *(f"${number}::{one.of.name}[]" for number, one in enumerate(fields.values(), start=2))]
    values = [f"c{number}" for number in range(1, len(arrays) + 1)]
    first, *others = values
    selected = ", ".join([f'{first} COLLATE "C"', *others])
    return f"SELECT {selected} FROM unnest({', '.join(arrays)}) AS given ({', '.join(values)})"  # noqa: S608 - no names


_WITH = re.compile(r"WITH(?:\s+RECURSIVE\b)?", re.IGNORECASE)
