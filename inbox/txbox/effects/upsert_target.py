"""The table that an upsert writes to: what its columns take, and which keys it has."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox.errors import InvalidConfiguration, RightsMissing
from txbox.postgres.driver_cursor import run
from txbox.postgres.sql import quote, unescaped
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import INSUFFICIENT_PRIVILEGE, sqlstate


class TargetStatements(SqlFile, file="upsert_target.sql"):
    """The statements of upsert_target.sql."""

    find_table: str
    read_columns: str
    read_keys: str


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """One column of the table."""

    name: str
    type: str  # as in CREATE TABLE
    type_without_length: str  # a cast to it cuts nothing off
    compared_as: str  # the type in which a key has it; a cast to it cuts nothing off, and rounds as the column does
    is_text: bool
    is_domain: bool
    is_required: bool  # an INSERT must give it a value
    is_generated: bool  # an INSERT must give it none


@dataclass(frozen=True, slots=True)
class UpsertTarget:
    """A table."""

    name: str  # with its schema, quoted
    columns: tuple[TargetColumn, ...]
    keys: tuple[tuple[str, ...], ...]  # the unique keys that ON CONFLICT can take
    primary_key: tuple[str, ...] | None  # if it is among them
    collations: Mapping[frozenset[str], Mapping[str, str]] = field(default_factory=dict)
    """Of a key, by its columns: the collation, for SQL, of each one whose texts may be equal and not the same."""
    nulls_differ: frozenset[frozenset[str]] = frozenset()  # keys in which a null is possible, and like no other


def read_target(connection: Connection, table: str) -> UpsertTarget:
    """Read a table, named as in SQL, from the catalogue.

    Raises:
        InvalidConfiguration: there is no such table, or it is none that takes an upsert.
        RightsMissing: this user may not insert, update or read any of its columns.
    """
    sql = TargetStatements.load()
    try:
        found = run(connection, sql.find_table, {"table_name": table}).one_or_none()
    except DBAPIError as error:
        if sqlstate(error) == INSUFFICIENT_PRIVILEGE:
            raise RightsMissing(f"SCHEMA of {table}", "USAGE") from error
        if (sqlstate(error) or "").startswith(_NOT_A_NAME):
            raise InvalidConfiguration(
                f'{table!r} is not the name of a table as in SQL: purchase, shop.purchase, "Shop"."Purchase"'
            ) from error
        raise
    if found is None:
        raise InvalidConfiguration(
            f"there is no table {table} to upsert into; name it as in SQL: with its schema, and in double quotes if "
            "it has capitals or a dot in its name"
        )
    if found.kind not in _TABLES:
        raise InvalidConfiguration(
            f"{table} is a {_KINDS.get(found.kind, 'relation of another kind')}, and an upsert needs a table; name "
            "the table behind it, or write the statement"
        )
    name = unescaped(f"{quote(found.schema_name)}.{quote(found.table_name)}")
    if lacking := [right.upper() for right in ("insert", "select", "update") if not getattr(found, right)]:
        raise RightsMissing(name, ", ".join(lacking))
    values = {"table_oid": found.oid}
    columns = tuple(TargetColumn(*row) for row in run(connection, sql.read_columns, values))
    keys: dict[tuple[str, ...], bool] = {}
    collations: dict[frozenset[str], dict[str, str]] = {}
    nulls_differ = set()
    for of, collated, of_nulls, is_primary in run(connection, sql.read_keys, values):
        keys.setdefault(tuple(of), is_primary)
        if of_nulls:
            nulls_differ.add(frozenset(of))
        # ON CONFLICT takes all keys of these columns at once.
        collations.setdefault(frozenset(of), {}).update({one: by for one, by in zip(of, collated, strict=True) if by})
    primary = next((of for of, is_primary in keys.items() if is_primary), None)
    return UpsertTarget(name, columns, tuple(keys), primary, collations, frozenset(nulls_differ))


_TABLES = ("r", "p")
_KINDS = {"v": "view", "m": "materialized view", "f": "foreign table", "S": "sequence", "i": "index", "c": "type"}
_NOT_A_NAME = ("42601", "42602", "0A000")
