"""Compare our tables in a live database with the metadata of ``txbox.schema``.

The same server describes what is expected: the metadata's tables are created as temporary ones in a transaction that is
rolled back, and Postgres describes both. So expressions are compared as Postgres writes them, and nothing has to be
parsed. This needs the right to create temporary tables, and a server that is not a read-only replica.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.schema import CreateIndex, CreateTable

from txbox.postgres.engines import require_server
from txbox.postgres.transactions import refuse_autocommit
from txbox.schema import TABLE_NAMES, VIEW_NAME, is_generation, tables
from txbox_migrations.version_mark import refuse_before_baseline, require_prefix


class Severity(StrEnum):
    """How much a difference matters."""

    DRIFT = "drift"
    """Something of ours is missing or different, or something was added that can refuse our rows."""
    EXTRA = "extra"
    """Something harmless was added, such as an index for a report."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between a live table and the metadata.

    Attributes:
        table: the table's name, with its prefix.
        what: the part of the table, such as ``column body: type`` or ``index dead_letter_parked_once``.
        expected: how the metadata describes it; None: the metadata does not have it.
        found: how the database describes it; None: the database does not have it.
        severity: whether a check fails because of it.
    """

    table: str
    what: str
    expected: str | None
    found: str | None
    severity: Severity = Severity.DRIFT

    @property
    def sentence(self) -> str:
        """The difference in words."""
        if self.found is None:
            return f"{self.table}: {self.what} is missing; expected {self.expected}"
        if self.expected is None:
            return f"{self.table}: {self.what} was added: {self.found}"
        return f"{self.table}: {self.what} is {self.found}; expected {self.expected}"

    def __str__(self) -> str:
        return self.sentence


Part = tuple[str, str]
"""A part of a table: its kind (table, column, constraint, index) and its name."""
Properties = dict[str, str]
"""How Postgres describes one part."""
NONE: Final = "none"
"""The value of a property that a part does not have."""

_OIDS: Final[sa.BindParameter[int]] = sa.bindparam("oids", expanding=True)

_FIND_TABLES: Final = sa.text("""
    SELECT t.relname, t.oid
    FROM pg_catalog.pg_class AS t
    JOIN pg_catalog.pg_namespace AS n ON n.oid = t.relnamespace
    WHERE t.relname IN :names AND t.relkind IN ('r', 'p')
      AND CASE WHEN CAST(:schema AS text) IS NULL THEN pg_catalog.pg_table_is_visible(t.oid)
               ELSE n.nspname = CAST(:schema AS text) END
""").bindparams(sa.bindparam("names", expanding=True))

_FIND_TEMPORARY_TABLES: Final = sa.text("""
    SELECT t.relname, t.oid
    FROM pg_catalog.pg_class AS t
    WHERE t.relname IN :names AND t.relnamespace = pg_catalog.pg_my_temp_schema()
""").bindparams(sa.bindparam("names", expanding=True))

_DESCRIBE_TABLES: Final = sa.text("""
    SELECT t.oid AS table_oid, t.relpersistence = 'u' AS unlogged FROM pg_catalog.pg_class AS t WHERE t.oid IN :oids
""").bindparams(_OIDS)

_DESCRIBE_COLUMNS: Final = sa.text("""
    SELECT a.attrelid AS table_oid,
           a.attname AS name,
           pg_catalog.format_type(a.atttypid, a.atttypmod) AS type,
           a.attnotnull AS not_null,
           c.collname AS collation,
           pg_catalog.pg_get_expr(d.adbin, d.adrelid) AS expression,
           a.attidentity AS identity,
           a.attgenerated AS generated
    FROM pg_catalog.pg_attribute AS a
    LEFT JOIN pg_catalog.pg_collation AS c ON c.oid = a.attcollation
    LEFT JOIN pg_catalog.pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attrelid IN :oids AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum
""").bindparams(_OIDS)

# NOT NULL constraints (contype 'n', since Postgres 18) are compared as a property of their columns.
_DESCRIBE_CONSTRAINTS: Final = sa.text("""
    SELECT k.conrelid AS table_oid, k.conname AS name, pg_catalog.pg_get_constraintdef(k.oid) AS definition
    FROM pg_catalog.pg_constraint AS k
    WHERE k.conrelid IN :oids AND k.contype IN ('p', 'u', 'c', 'x', 'f')
    ORDER BY k.conname
""").bindparams(_OIDS)

# The index behind a constraint is compared as that constraint.
_DESCRIBE_INDEXES: Final = sa.text("""
    SELECT i.indrelid AS table_oid, x.relname AS name, pg_catalog.pg_get_indexdef(x.oid) AS definition,
           i.indisunique AS is_unique, i.indisvalid AS valid
    FROM pg_catalog.pg_index AS i
    JOIN pg_catalog.pg_class AS x ON x.oid = i.indexrelid
    WHERE i.indrelid IN :oids
      AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint AS k
                      WHERE k.conindid = i.indexrelid AND k.conrelid = i.indrelid)
    ORDER BY x.relname
""").bindparams(_OIDS)

_FIND_GENERATIONS: Final = sa.text("""
    SELECT t.relname, t.oid, pg_catalog.pg_get_expr(t.relpartbound, t.oid) AS bound
    FROM pg_catalog.pg_inherits AS i JOIN pg_catalog.pg_class AS t ON t.oid = i.inhrelid
    WHERE i.inhparent = :oid ORDER BY t.relname
""")

_IS_PARTITIONED: Final = sa.text("SELECT relkind = 'p' FROM pg_catalog.pg_class WHERE oid = :oid")

# Postgres's text of the view; its condition is compared if it has our columns and reads only our inbox.
_DESCRIBE_VIEW: Final = sa.text("""
    SELECT pg_catalog.pg_get_viewdef(v.oid) AS definition,
           EXISTS (SELECT FROM pg_catalog.pg_rewrite AS r JOIN pg_catalog.pg_depend AS d ON d.objid = r.oid
                   WHERE r.ev_class = v.oid AND d.classid = CAST('pg_rewrite' AS regclass) AND d.refobjid = :inbox)
             AS reads_inbox
    FROM pg_catalog.pg_class AS v
    WHERE v.relname = :name AND v.relkind = 'v'
      AND v.relnamespace = (SELECT relnamespace FROM pg_catalog.pg_class WHERE oid = :inbox)
""")
_QUOTED_NAME: Final = r'(?:"(?:[^"]|"")+"|[^\s".]+)'
_OF_TABLE: Final = rf"(?:{_QUOTED_NAME}\.)?"  # before version 16, Postgres qualifies each column with the table's name
_VIEW_CONDITION: Final = re.compile(
    rf"^ SELECT {_OF_TABLE}subscriber_id,\s+{_OF_TABLE}message_id\s+FROM \S.*\s+WHERE \(?{_OF_TABLE}(.*?)\)?;$",
    re.DOTALL,
)
_INDEX_HEAD: Final = re.compile(
    rf"CREATE (?:UNIQUE )?INDEX {_QUOTED_NAME} ON (?:ONLY )?(?:{_QUOTED_NAME}\.)?{_QUOTED_NAME} "
)


def find_drift(connection: Connection, *, schema: str | None = None, prefix: str = "") -> list[Difference]:
    """Compare our tables in a database with the metadata of this release.

    This compares tables, columns (type, nullability, collation, default, identity), primary keys, CHECK constraints and
    indexes with their uniqueness and predicates, and of a rotating inbox its generations and their view. It does not
    compare comments or the order of columns. Additions are differences too: harmless ones (a nullable column, an index
    that is not unique) have ``Severity.EXTRA``.

    Args:
        connection: a connection that is not in autocommit mode. In a transaction, this uses a savepoint; otherwise it
            begins a transaction. Either is rolled back.
        schema: the schema that holds the tables; None: the connection's search path.
        prefix: the prefix of every name.

    Returns:
        The differences; empty if the database is as it should be.

    Raises:
        NotInTransaction: the connection is in autocommit mode.
        InvalidConfiguration: the database is not UTF-8.
        MigrationError: the prefix is too long, or the tables are from before the baseline.
    """
    require_prefix(prefix)
    refuse_autocommit(connection)
    require_server(connection)
    names = [f"{prefix}{name}" for name in TABLE_NAMES]
    transaction = connection.begin_nested() if connection.in_transaction() else connection.begin()
    try:
        refuse_before_baseline(connection, schema=schema, prefix=prefix)
        # Before the temporary tables exist, because they come first on the search path.
        live = _find_tables(connection, _FIND_TABLES, {"names": names, "schema": schema})
        for table in tables("pg_temp", prefix).metadata.sorted_tables:  # without comments, which are not compared
            connection.execute(CreateTable(table))
            for index in table.indexes:
                connection.execute(CreateIndex(index))
        model = _find_tables(connection, _FIND_TEMPORARY_TABLES, {"names": names})
        described = _describe(connection, [*model.values(), *live.values()])
        differences: list[Difference] = []
        for name in names:
            if name not in live:
                differences.append(Difference(name, "the table", "a table", None))
            elif name == f"{prefix}processed_message":
                expected, found = described[model[name]], described[live[name]]
                differences += _compare_inbox(connection, name, prefix, live[name], expected, found)
            else:
                differences += _compare(name, described[model[name]], described[live[name]])
        return differences
    finally:
        transaction.rollback()


def _compare_inbox(
    connection: Connection,
    name: str,
    prefix: str,
    live: int,
    expected: dict[Part, Properties],
    found: dict[Part, Properties],
) -> Iterator[Difference]:
    """Compare the inbox in either form, one table or a rotating one with its generations, and the view of ids."""
    condition = "false"
    if not connection.execute(_IS_PARTITIONED, {"oid": live}).scalar_one():
        yield from _compare(name, expected, found)
    else:
        key = expected.pop(("constraint", f"{name}_pkey"))
        current = found.get(("column", "generation"), {}).get("default", NONE)
        column = {"type": "integer", "nullability": "NOT NULL", "collation": NONE, "identity": NONE, "generated": NONE}
        yield from _compare(name, {**expected, ("column", "generation"): {**column, "default": current}}, found)
        generations = connection.execute(_FIND_GENERATIONS, {"oid": live}).all()
        described = _describe(connection, [part.oid for part in generations])
        for part in generations:
            of_part = {**expected, ("column", "generation"): column, ("constraint", f"{part.relname}_pkey"): key}
            yield from _compare(part.relname, of_part, described[part.oid])
            number = part.relname.removeprefix(f"{name}_g")
            if not is_generation(part.relname, prefix) or part.bound != f"FOR VALUES IN ({number})":
                yield Difference(name, f"generation {part.relname}", "FOR VALUES IN its number", part.bound)
        if f"{name}_g{current}" not in {part.relname for part in generations}:
            yield Difference(name, f"generation {current}", "a generation for what is recorded", None)
        condition = f"generation < {current}"
    view = connection.execute(_DESCRIBE_VIEW, {"name": f"{prefix}{VIEW_NAME}", "inbox": live}).one_or_none()
    if view is None or not view.reads_inbox:
        yield Difference(f"{prefix}{VIEW_NAME}", "the view", f"a view of {name}", None)
    elif (match := _VIEW_CONDITION.match(view.definition)) is None or match[1] != condition:
        yield Difference(f"{prefix}{VIEW_NAME}", "its condition", condition, match[1] if match else view.definition)


def _find_tables(connection: Connection, statement: sa.TextClause, parameters: Mapping[str, object]) -> dict[str, int]:
    return {row.relname: row.oid for row in connection.execute(statement, parameters)}


def _describe(connection: Connection, oids: Sequence[int]) -> dict[int, dict[Part, Properties]]:
    """Return Postgres's description of every part of some tables."""
    parameters = {"oids": oids}
    described: dict[int, dict[Part, Properties]] = {}
    for row in connection.execute(_DESCRIBE_TABLES, parameters):
        described[row.table_oid] = {("table", ""): {"durability": "unlogged" if row.unlogged else "logged"}}
    for row in connection.execute(_DESCRIBE_COLUMNS, parameters):
        described[row.table_oid]["column", row.name] = {
            "type": row.type,
            "nullability": "NOT NULL" if row.not_null else "NULL",
            "collation": row.collation or NONE,
            "default": row.expression or NONE,
            "identity": {"a": "ALWAYS", "d": "BY DEFAULT"}.get(_text(row.identity), NONE),
            "generated": {"s": "STORED", "v": "VIRTUAL"}.get(_text(row.generated), NONE),
        }
    for row in connection.execute(_DESCRIBE_CONSTRAINTS, parameters):
        described[row.table_oid]["constraint", row.name] = {"definition": row.definition}
    for row in connection.execute(_DESCRIBE_INDEXES, parameters):
        described[row.table_oid]["index", row.name] = {
            "uniqueness": "UNIQUE" if row.is_unique else "not unique",
            "definition": _INDEX_HEAD.sub("", row.definition, count=1),
            "state": "valid" if row.valid else "INVALID",
        }
    return described


def _compare(table: str, expected: Mapping[Part, Properties], found: Mapping[Part, Properties]) -> Iterator[Difference]:
    for part, properties in expected.items():
        if part not in found:
            yield Difference(table, _label(part), _phrase(properties), None)
            continue
        for key, value in properties.items():
            if found[part][key] != value:
                yield Difference(table, f"{_label(part)}: {key}", value, found[part][key])
    for part, properties in found.items():
        if part not in expected:
            severity = Severity.DRIFT if _can_refuse_rows(part, properties) else Severity.EXTRA
            yield Difference(table, _label(part), None, _phrase(properties), severity)


def _can_refuse_rows(part: Part, properties: Properties) -> bool:
    """Return whether an addition can make one of our INSERTs, which do not name it, fail."""
    kind, _ = part
    if kind == "column":
        fills_itself = any(properties[key] != NONE for key in ("default", "identity", "generated"))
        return properties["nullability"] == "NOT NULL" and not fills_itself
    return kind == "constraint" or properties["uniqueness"] == "UNIQUE"


def _label(part: Part) -> str:
    kind, name = part
    return f"{kind} {name}" if name else kind


def _phrase(properties: Properties) -> str:
    return ", ".join(f"{key} {value}" for key, value in properties.items() if value != NONE)


def _text(value: str | bytes) -> str:
    """Decode a value of Postgres's type "char", which some drivers return as bytes."""
    return value.decode() if isinstance(value, bytes) else value
