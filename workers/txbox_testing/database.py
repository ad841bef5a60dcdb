"""The database of a trial, seen over a connection of its own: what it holds, and how it comes back to what it held."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, cast

import psycopg
from psycopg import sql
from sqlalchemy import Engine, NullPool, create_engine

from txbox import InvalidConfiguration
from txbox.postgres.sql_files import SqlFile
from txbox.schema import TABLE_NAMES

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # which needs greenlet

Row = Mapping[str, Any]
State = Mapping[str, list[Row]]
"""The rows of each table, by its name."""

Differences = dict[str, tuple[list[str], list[str]]]
"""Of each table that differs: the rows that are missing, and those that are too many."""

COMPARED = frozenset({"outbox_message", "dead_letter", "aggregate_watermark"})
"""The tables of txbox in which an effect may be; the others hold how often something was tried, and where."""

END_SECONDS = 5.0
CHECK_SECONDS = 0.005
"""How long sessions may take to end, and how often is looked."""

DELETE = sql.SQL("DELETE FROM ONLY {}")
READ = sql.SQL("SELECT to_jsonb(t) FROM ONLY {} AS t")
COPY_OUT = sql.SQL("COPY {} TO STDOUT")
COPY_IN = sql.SQL("COPY {} FROM STDIN")


class TrialStatements(SqlFile, file="database.sql"):
    """The statements of ``database.sql``."""

    list_tables: str
    end_sessions: str
    ignore_constraints: str


class TrialDatabase:
    """Reads the tables of a database, restores them, and ends its sessions.

    Args:
        engine: of the tests; only its URL is used.
        schema: of txbox's tables; None: the search path.
        prefix: of their names.

    Attributes:
        schema: as given.
        prefix: as given.
        driver: its connection, once it is entered; each statement commits.
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
        """The server's address and TCP port; None: it is reached by a Unix socket."""
        info = self.driver.info
        return (info.hostaddr, info.port) if info.hostaddr else None

    def restore(self) -> None:
        """Bring every table back to the rows that it had when this was entered.

        Raises:
            InvalidConfiguration: this user may not switch triggers and foreign keys off for that.
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
        """Return what the tables hold, but for those in which txbox counts its tries."""
        state: dict[str, list[Row]] = {}
        for schema, table, beside_inbox in self._listed():
            # What a bulk load has staged, and left, is swept later.
            ours = table in self._ours or table.startswith(f"{self.prefix}bulk_load_")
            if not (beside_inbox and ours):
                shown = table if schema == "public" else f"{schema}.{table}"
                rows = self.driver.execute(READ.format(sql.Identifier(schema, table)))
                state[shown] = [row for (row,) in rows]
        return state

    def end_sessions(self) -> None:
        """End all other sessions, as Postgres does when their clients have died, and wait until they have ended."""
        deadline = time.monotonic() + END_SECONDS
        while self.driver.execute(self._statements.end_sessions).fetchone() != (0,) and time.monotonic() < deadline:
            time.sleep(CHECK_SECONDS)

    def _tables(self) -> list[tuple[str, str]]:
        """Return the schema and the name of each."""
        return [(schema, name) for schema, name, _ in self._listed()]

    def _listed(self) -> list[tuple[str, str, bool]]:
        asked = {"inbox": self._statements.name_of("processed_message")}
        return cast("list[tuple[str, str, bool]]", self.driver.execute(self._statements.list_tables, asked).fetchall())

    def _copy_out(self, table: tuple[str, str]) -> bytes:
        with self.driver.cursor() as cursor, cursor.copy(COPY_OUT.format(sql.Identifier(*table))) as copy:
            return b"".join(bytes(part) for part in copy)


def changing_columns(one: State, other: State) -> dict[str, frozenset[str]]:
    """Return the columns whose values differ between two states that should be the same, such as times and serials."""
    return {
        table: frozenset(
            column
            for column in {name for row in (*rows, *other.get(table, ())) for name in row}
            if Counter(_text(row.get(column)) for row in rows)
            != Counter(_text(row.get(column)) for row in other.get(table, ()))
        )
        for table, rows in one.items()
    }


def differences(expected: State, found: State, ignored: Mapping[str, frozenset[str]]) -> Differences:
    """Compare states, without some columns of each table."""
    result: Differences = {}
    for table in sorted(expected.keys() | found.keys()):
        leave_out = ignored.get(table, frozenset())
        wanted = _bag(expected.get(table, ()), leave_out)
        has = _bag(found.get(table, ()), leave_out)
        if wanted != has:
            result[table] = (sorted((wanted - has).elements()), sorted((has - wanted).elements()))
    return result


def _bag(rows: Iterable[Row], leave_out: frozenset[str]) -> Counter[str]:
    return Counter(_text({name: value for name, value in row.items() if name not in leave_out}) for row in rows)


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def where_txbox_is(options: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the schema and the prefix of txbox's tables, by the options of a worker."""
    known = options.get("inbox") or options.get("ledger")
    return getattr(known, "schema", None), getattr(known, "prefix", "")
