"""Upserts: events become rows of a table, or replace rows with the same key, without a line of SQL.

::

    INSERT INTO purchase AS target (order_id, cents, updated_at)
    SELECT DISTINCT ON (order_id) order_id, cents, updated_at FROM fresh_event
    ORDER BY order_id, updated_at DESC NULLS LAST, fresh_event.message_id DESC
    ON CONFLICT (order_id) DO UPDATE SET cents = excluded.cents, updated_at = excluded.updated_at
    WHERE target.updated_at IS NULL OR excluded.updated_at > target.updated_at

ON CONFLICT refuses to change a row twice, hence DISTINCT ON, which compares as the key's index does. Rows are locked in
the order of their keys, as workers should lock them. Casts are to the type without its length: a cast to ``varchar(3)``
would truncate a text that the INSERT itself refuses. In the key, numbers and times are rounded as the INSERT rounds.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox.effects.fields import Field, read_fields
from txbox.effects.sql_script import FRESH_EVENT
from txbox.errors import InvalidConfiguration, RightsMissing
from txbox.postgres.driver_cursor import run
from txbox.postgres.sql import quote, unescaped
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import INSUFFICIENT_PRIVILEGE, sqlstate


class TargetStatements(SqlFile, file="upsert_target.sql"):
    find_table: str
    read_columns: str
    read_keys: str


@dataclass(frozen=True, slots=True)
class TargetColumn:
    name: str
    type: str  # as in CREATE TABLE
    type_without_length: str  # a cast to it truncates nothing
    compared_as: str  # the type of a key's value; a cast to it truncates nothing, and rounds as the column does
    is_text: bool
    is_domain: bool
    is_required: bool  # an INSERT must give it a value
    is_generated: bool  # an INSERT must not give it a value


@dataclass(frozen=True, slots=True)
class UpsertTarget:
    name: str  # with its schema, quoted
    columns: tuple[TargetColumn, ...]
    keys: tuple[tuple[str, ...], ...]  # the unique keys that ON CONFLICT can take
    primary_key: tuple[str, ...] | None  # if it is among them
    collations: Mapping[frozenset[str], Mapping[str, str]] = field(default_factory=dict)
    """By the columns of a key: for SQL, the collation of each one whose texts may be equal but not the same."""
    nulls_differ: frozenset[frozenset[str]] = frozenset()  # keys that may hold nulls, each unlike any other


def read_target(connection: Connection, table: str) -> UpsertTarget:
    """Read a table, named as in SQL, from the catalogue.

    Raises:
        InvalidConfiguration: there is no such table, or it cannot take an upsert.
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
        # ON CONFLICT uses all keys of these columns at once.
        collations.setdefault(frozenset(of), {}).update({one: by for one, by in zip(of, collated, strict=True) if by})
    primary = next((of for of, is_primary in keys.items() if is_primary), None)
    return UpsertTarget(name, columns, tuple(keys), primary, collations, frozenset(nulls_differ))


_TABLES = ("r", "p")
_KINDS = {"v": "view", "m": "materialized view", "f": "foreign table", "S": "sequence", "i": "index", "c": "type"}
_NOT_A_NAME = ("42601", "42602", "0A000")


MESSAGE_ID = "message_id"
"""A column that ``fresh_event`` always has; it is written if the table has a column of that name."""


@dataclass(frozen=True, slots=True)
class Upsert:
    """An effect of a bulk load: each event is a row of a table, and replaces the one with the same key.

    ::

        bulk_load(events, …, apply=Upsert("purchase", key=["order_id"], only_if_newer="updated_at"))

    The columns are those that the events and the table have in common, by name; values are cast to the columns' types.
    An event is a whole row: a null is written as null, and so is a field that the event lacks while other events of the
    load have it. A column that no event has stays as it is, or gets its default.

    Keys are equal if they are equal in the table: after rounding to ``numeric(10,2)``, and by the key's collation.

    Events come in no order. So with ``only_if_newer``, the newest event of a key wins, in whatever order they come; of
    those with the same time, the one merged first, and within one transaction the one with the greatest message id.
    Without it, the event merged last wins, and within one transaction the one with the greatest message id.

    Attributes:
        table: the table, named as in SQL: ``purchase``, ``shop.purchase``, ``"Shop"."Purchase"``.
        key: the columns of the primary key, or of another unique key. None: the primary key.
        only_if_newer: a column, such as the time of the last change: a row is replaced only if the event's value is
            greater, or the row has none.
        ignore_columns: columns of the events that are not written. Any other column that the table lacks is an error,
            except the message id.
        fields: fields as of a ``SqlEffect``, instead of the events' columns: events are then judged as a worker judges
            them.
        typed_fields: the same fields, parsed.

    Raises:
        InvalidConfiguration: when made, if something cannot work.
    """

    table: str
    _: KW_ONLY
    key: Sequence[str] | None = None
    only_if_newer: str | None = None
    ignore_columns: Sequence[str] = ()
    fields: Mapping[str, Field | str] | str | None = None
    typed_fields: Mapping[str, Field] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.table, str) or not self.table.strip():
            raise InvalidConfiguration(f"an upsert needs the name of a table, not {self.table!r}")
        for name in ("key", "ignore_columns"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        if self.key is not None and not 0 < len(self.key) == len(set(self.key)):
            raise InvalidConfiguration(f"the key of an upsert is one column or more, each once, not {self.key!r}")
        object.__setattr__(self, "typed_fields", None if self.fields is None else read_fields(self.fields))

    def check(self, connection: Connection) -> UpsertTarget:
        """Read the table, and check all that does not depend on the events' columns; with fields, check those too.

        Raises:
            InvalidConfiguration: the table, its keys or its columns do not fit.
            RightsMissing: this user may not write to the table.
        """
        target = read_target(connection, self.table)
        self.key_in(target)
        names = {one.name for one in target.columns}
        if self.only_if_newer is not None and self.only_if_newer not in names:
            raise InvalidConfiguration(f"{target.name} has no column {self.only_if_newer} to tell what is newer")
        if self.typed_fields is not None:
            self.columns_in(target, self.typed_fields)
        return target

    def key_in(self, target: UpsertTarget) -> tuple[str, ...]:
        """Return the columns of the key; raise ``InvalidConfiguration`` if the table has no such key."""
        if self.key is None:
            if target.primary_key is not None:
                return target.primary_key
            what = "no primary key that ON CONFLICT can take; name another unique key"
        else:
            if any(set(self.key) == set(one) for one in target.keys):
                return tuple(self.key)
            what = f"no unique key on ({', '.join(self.key)}) that ON CONFLICT can take"
        there = ", ".join(f"({', '.join(one)})" for one in target.keys) or "none"
        raise InvalidConfiguration(
            f"{target.name} has {what}; it has {there} (what is deferrable, partial or over expressions does not do)"
        )

    def columns_in(self, target: UpsertTarget, names: Collection[str]) -> tuple[TargetColumn, ...]:
        """Return the columns that events with these columns write, in the table's order.

        Raises:
            InvalidConfiguration: a column is not in the table or cannot be written, or a required one is missing.
        """
        if unknown := [name for name in self.ignore_columns if name not in names and name != MESSAGE_ID]:
            raise InvalidConfiguration(f"the events have no column {_listed(unknown)}, which is to be ignored")
        given = [name for name in names if name not in self.ignore_columns and name != MESSAGE_ID]
        in_table = {one.name: one for one in target.columns}
        if lacking := [name for name in given if name not in in_table]:
            raise InvalidConfiguration(
                f"{target.name} has no column {_listed(lacking)}, and the events have; rename it in one of the two, or "
                "ignore it (ignore_columns, on the command line --ignore-columns)"
            )
        if generated := [name for name in given if in_table[name].is_generated]:
            raise InvalidConfiguration(
                f"{target.name} generates column {_listed(generated)} by itself, and the events have it too; ignore it "
                "(ignore_columns, on the command line --ignore-columns)"
            )
        id_is_written = MESSAGE_ID not in self.ignore_columns
        written = tuple(
            one
            for one in target.columns
            if one.name in given or (one.name == MESSAGE_ID and id_is_written and not one.is_generated)
        )
        there = {one.name for one in written}
        if missing := [name for name in self.key_in(target) if name not in there]:
            raise InvalidConfiguration(f"the events have no column {_listed(missing)}, and the key has")
        if self.only_if_newer is not None and self.only_if_newer not in there:
            raise InvalidConfiguration(f"the events have no column {self.only_if_newer} to tell what is newer")
        if required := [one.name for one in target.columns if one.is_required and one.name not in there]:
            raise InvalidConfiguration(
                f"the events have no column {_listed(required)}, which {target.name} needs: it is NOT NULL without a "
                "default"
            )
        return written

    def statement(self, target: UpsertTarget, types: Mapping[str, str]) -> str:
        """Return the statement for events whose columns in ``fresh_event`` are of these types, by name.

        Raises:
            InvalidConfiguration: the columns do not fit.
        """
        key = self.key_in(target)
        columns = self.columns_in(target, types)
        compared = {*key, self.only_if_newer}
        values = [_value(one, types.get(one.name, "text"), compared=one.name in compared) for one in columns]
        by_name = {one.name: one for one in columns}
        collations = target.collations.get(frozenset(key), {})
        in_key = [_in_key(by_name[one], types.get(one, "text"), collations.get(one)) for one in key]
        if frozenset(key) in target.nulls_differ:  # DISTINCT takes nulls for equal
            in_key.append(f"CASE WHEN num_nulls({', '.join(in_key)}) > 0 THEN {FRESH_EVENT}.{MESSAGE_ID} END")
        distinct = ", ".join(in_key)
        order = [distinct, f"{FRESH_EVENT}.{MESSAGE_ID} DESC"]
        if self.only_if_newer is not None:
            order.insert(1, f"{_quoted(self.only_if_newer)} DESC NULLS LAST")
        others = [_quoted(one.name) for one in columns if one.name not in key]
        lines = [
            f"INSERT INTO {target.name} AS target ({', '.join(_quoted(one.name) for one in columns)})",
            f"SELECT DISTINCT ON ({distinct}) {', '.join(values)}",
            f"FROM {FRESH_EVENT} ORDER BY {', '.join(order)}",
            f"ON CONFLICT ({', '.join(map(_quoted, key))}) {self._on_conflict(others)}",
        ]
        return "\n".join(lines)

    def _on_conflict(self, others: Sequence[str]) -> str:
        if not others:
            return "DO NOTHING"
        update = f"DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in others)}"
        if self.only_if_newer is None:
            return update
        newer = _quoted(self.only_if_newer)
        return f"{update}\nWHERE target.{newer} IS NULL OR excluded.{newer} > target.{newer}"


def _value(column: TargetColumn, type_: str, *, compared: bool) -> str:
    """Return an event's value as the column takes it, under the column's name.

    An INSERT casts between types that it considers similar, but casts no texts. A value that is compared with other
    events must have the column's type first: two texts may be one uuid.
    """
    name = _quoted(column.name)
    if type_ == column.type or (column.is_text and (column.is_domain or not compared)):
        return name
    if compared or type_ == "text" or type_.endswith("[]"):
        return f"{name}::{column.type_without_length} AS {name}"
    return name


def _in_key(column: TargetColumn, type_: str, collation: str | None) -> str:
    """Return an event's value as the key compares it, so that no two of the remaining events become one row."""
    name = _quoted(column.name)
    value = name if type_ == column.type else f"{name}::{column.compared_as}"
    return value if collation is None else f"{value} COLLATE {collation}"


def _quoted(name: str) -> str:
    return unescaped(quote(name))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


_SHOWN = 10
