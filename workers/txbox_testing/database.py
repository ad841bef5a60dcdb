"""The database of a trial, seen over a connection of its own: reads its tables, restores them and ends its sessions."""

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Self, cast

import psycopg
from psycopg import sql
from sqlalchemy import Engine, NullPool, create_engine

from txbox import InvalidConfiguration
from txbox.postgres.sql_files import SqlFile
from txbox.schema import TABLE_NAMES
from txbox_testing.comparison import Row, State, changing_columns

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # which needs greenlet

COMPARED = frozenset({"outbox_message", "dead_letter", "aggregate_watermark"})
"""The tables of txbox that may hold effects. The others hold how often something was tried, and where."""

FOLLOWS = {"lane": "message_id"}
"""A column of theirs that may differ if another one does: of 64 lanes, two random ids now and then have the same."""

END_SECONDS = 5.0
CHECK_SECONDS = 0.005
"""How long sessions may take to end, and the pause between checks."""

DELETE = sql.SQL("DELETE FROM ONLY {}")
READ = sql.SQL("SELECT to_jsonb(t) FROM ONLY {} AS t")
COPY_OUT = sql.SQL("COPY {} TO STDOUT")
COPY_IN = sql.SQL("COPY {} FROM STDIN")


class TrialStatements(SqlFile, file="database.sql"):
    list_tables: str
    list_columns: str
    end_sessions: str
    ignore_constraints: str


class TrialDatabase:
    """Reads the tables of a database, restores them, and ends its sessions.

    Args:
        engine: the tests' engine. Only its URL is used.
        schema: the schema of txbox's tables; None leaves it to the search path.
        prefix: what the tables' names start with.

    Attributes:
        driver: the connection, once it is entered. Each statement commits.
    """

    def __init__(self, engine: "Engine | AsyncEngine", schema: str | None, prefix: str) -> None:
        url = engine.url.set(drivername="postgresql+psycopg")
        self._engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        self.schema, self.prefix = schema, prefix
        self._statements = TrialStatements.load(schema, prefix)
        self._ours = {f"{prefix}{name}" for name in TABLE_NAMES} - {f"{prefix}{name}" for name in COMPARED}

    def __enter__(self) -> Self:
        self._connection = self._engine.connect()
        self.driver = cast("psycopg.Connection[tuple[Any, ...]]", self._connection.connection.dbapi_connection)
        self._kept = {table: self._copy_out(table) for table in self._tables()}
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._engine.dispose()

    @property
    def address(self) -> tuple[str, int] | None:
        """The server's address and TCP port, or None if it is reached by a Unix socket."""
        info = self.driver.info
        return (info.hostaddr, info.port) if info.hostaddr else None

    def restore(self) -> None:
        """Restore the rows that every table had when this was entered.

        Raises:
            InvalidConfiguration: this user may not disable triggers and foreign keys for that.
        """
        try:
            with self.driver.transaction(), self.driver.cursor() as cursor:
                cursor.execute(self._statements.ignore_constraints)
                for table in self._tables():
                    cursor.execute(DELETE.format(sql.Identifier(*table)))
                    if rows := self._kept.get(table):
                        with cursor.copy(COPY_IN.format(sql.Identifier(*table))) as copy:
                            copy.write(rows)
        except psycopg.errors.InsufficientPrivilege as error:
            raise InvalidConfiguration(
                "a trial restores the tables between its points, and needs a user that may set "
                "session_replication_role: a superuser, or GRANT SET ON PARAMETER session_replication_role"
            ) from error

    def read(self) -> State:
        """Return the rows of all tables except those in which txbox counts its attempts."""
        state: dict[str, list[Row]] = {}
        for schema, table, beside_inbox in self._listed():
            # What a bulk load has staged and left behind is swept later.
            ours = table in self._ours or table.startswith(f"{self.prefix}bulk_load_")
            if not (beside_inbox and ours):
                rows = self.driver.execute(READ.format(sql.Identifier(schema, table)))
                state[_shown(schema, table)] = [row for (row,) in rows]
        return state

    def left_out(self, one: State, other: State, ignore: Collection[str]) -> dict[str, frozenset[str]]:
        """Return the columns of each table that are not compared.

        Args:
            one: the state after an undisturbed delivery.
            other: the state after another one. A column that differs between the two is left out if it varies by
                nature, as times and serial numbers do, or belongs to one of txbox's own tables.
            ignore: columns that are left out anyway, as ``table.column``.

        Raises:
            InvalidConfiguration: a column in ``ignore`` does not exist.
        """
        listed = self.driver.execute(self._statements.list_columns).fetchall()
        if unknown := set(ignore) - {f"{_shown(schema, table)}.{column}" for schema, table, column, _ in listed}:
            raise InvalidConfiguration(f"ignore: there is no column {', '.join(sorted(unknown))}; write table.column")
        ours = {
            (schema, table)
            for schema, table, beside_inbox in self._listed()
            if beside_inbox and table in {f"{self.prefix}{name}" for name in COMPARED}
        }
        changing = changing_columns(one, other)
        result: dict[str, set[str]] = {}
        for schema, table, column, varies in listed:
            shown = _shown(schema, table)
            our_own = (schema, table) in ours
            differing = changing.get(shown, frozenset())
            differs = column in differing or (our_own and FOLLOWS.get(column) in differing)
            if (differs and (varies or our_own)) or f"{shown}.{column}" in ignore:
                result.setdefault(shown, set()).add(column)
        return {table: frozenset(result[table]) for table in sorted(result)}

    def end_sessions(self) -> None:
        """End all other sessions, as Postgres does when their clients have died, and wait until they have ended."""
        deadline = time.monotonic() + END_SECONDS
        while self.driver.execute(self._statements.end_sessions).fetchone() != (0,) and time.monotonic() < deadline:
            time.sleep(CHECK_SECONDS)

    def _tables(self) -> list[tuple[str, str]]:
        return [(schema, name) for schema, name, _ in self._listed()]

    def _listed(self) -> list[tuple[str, str, bool]]:
        asked = {"inbox": self._statements.name_of("processed_message")}
        return cast("list[tuple[str, str, bool]]", self.driver.execute(self._statements.list_tables, asked).fetchall())

    def _copy_out(self, table: tuple[str, str]) -> bytes:
        with self.driver.cursor() as cursor, cursor.copy(COPY_OUT.format(sql.Identifier(*table))) as copy:
            return b"".join(bytes(part) for part in copy)


def _shown(schema: str, table: str) -> str:
    return table if schema == "public" else f"{schema}.{table}"


def where_txbox_is(options: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the schema and the prefix of txbox's tables, from a worker's options."""
    known = options.get("inbox") or options.get("ledger")
    return getattr(known, "schema", None), getattr(known, "prefix", "")
