"""SQL files: the statements of a subject, next to its code, each with a name.

::

    -- name: attempts
    -- How often a message was tried so far.
    -- parameters: subscriber_id text, message_id text
    -- returns: attempts; no row if it was not tried
    SELECT attempts FROM {{message_failure}} WHERE subscriber_id = %(subscriber_id)s AND message_id = %(message_id)s

Values are always bound: ``%(name)s`` is psycopg's placeholder. Double braces are replaced once, when the file is
loaded for a schema and a prefix, by one of these: a table's name as SQLAlchemy quotes it;
``{{literal(message_failure)}}``, the same within a string; ``{{microseconds(parked_at)}}``, a time as ``moment`` reads
it; a fragment of the file; or a constant. A fragment starts with ``-- fragment: name`` instead of ``-- name: name``,
and must stand above its uses.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property, lru_cache
from importlib import resources
from typing import Any, ClassVar, Self, cast

from sqlalchemy import Table

from txbox.postgres.sql import literal, microseconds, quoted, unescaped
from txbox.schema import Tables, tables

_HEADER = re.compile(r"^-- (name|fragment): (\w+)$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\{\{(?:(\w+)\((.+?)\)|(\w+))\}\}")


class SqlFile:
    """The statements of one file for the tables of one schema, under one prefix.

    ::

        class FailureStatements(SqlFile, file="failures.sql", constants={"max_history": 20}):
            attempts: str

    A subclass names its file, which is in the same folder, and annotates an attribute of type str for each statement.
    With ``fragments_of``, its statements may use the fragments of another subclass's file.
    """

    _file: ClassVar[str]
    _constants: ClassVar[Mapping[str, object]]
    _fragments_of: ClassVar["type[SqlFile] | None"]

    def __init_subclass__(
        cls, *, file: str, constants: Mapping[str, object] | None = None, fragments_of: "type[SqlFile] | None" = None
    ) -> None:
        cls._file, cls._constants, cls._fragments_of = file, constants or {}, fragments_of

    def __init__(self, schema: str | None, prefix: str) -> None:
        self._place = schema, prefix
        values = {name: str(value) for name, value in self._constants.items()}
        texts: dict[str, str] = {}
        kind: type[SqlFile] | None = type(self)
        while kind is not None:  # fragments must precede the statements that use them
            texts = {**_parsed(kind.__module__.rpartition(".")[0], kind._file), **texts}  # noqa: SLF001 - of this module
            kind = kind._fragments_of  # noqa: SLF001 - the same
        if any(map(_PLACEHOLDER.search, texts.values())):  # without placeholders no dialect is needed: loads faster
            named = ((field.name, getattr(self.tables, field.name)) for field in fields(self.tables))
            values |= {name: quoted(table) for name, table in named if isinstance(table, Table)}
        for name, text in texts.items():
            values[name] = _filled(text, values)
        for name in _annotated(type(self)):
            setattr(self, name, values[name])

    @cached_property
    def tables(self) -> Tables:
        return tables(*self._place)

    @classmethod
    def load(cls, schema: str | None = None, prefix: str = "") -> Self:
        """Return the statements for one schema (None: the search path) and prefix; always the same object."""
        return cast(Self, _load(cast(Any, cls), schema, prefix))

    def name_of(self, table: str) -> str:
        """Return a table's name, quoted and with its schema: for messages, and for looking it up in the catalogue."""
        return unescaped(quoted(getattr(self.tables, table)))


def parse(text: str) -> dict[str, str]:
    """Return a file's statements and fragments by name, without comments."""
    found = list(_HEADER.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    return {
        match[2]: "\n".join(
            line for line in text[match.end() : end].splitlines() if line.strip() and not line.lstrip().startswith("--")
        )
        for match, end in zip(found, ends, strict=True)
    }


def _filled(text: str, values: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        function, argument, name = match.groups()
        return values[name] if function is None else _FUNCTIONS[function](values.get(argument, argument))

    return _PLACEHOLDER.sub(value, text)


_FUNCTIONS = {"literal": literal, "microseconds": microseconds}


def _annotated(kind: type[Any]) -> list[str]:
    return [name for base in kind.__mro__ for name, type_ in inspect.get_annotations(base).items() if type_ is str]


@lru_cache(maxsize=64)
def _parsed(package: str, file: str) -> Mapping[str, str]:
    return parse(resources.files(package).joinpath(file).read_text("utf-8"))


@lru_cache(maxsize=1024)
def _load(kind: type[SqlFile], schema: str | None, prefix: str) -> SqlFile:
    return kind(schema, prefix)
