"""The reader: runs the statements of one page, each within limits, and measures how long the database takes.

A page is read while the database may be busy, locked or partly forbidden. So each read is a read-only transaction of
its own. If it takes too long, waits for a lock or lacks a right, it returns None, and the page says so.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, RowMapping
from sqlalchemy.exc import DBAPIError

from txbox.errors import RightsMissing, TableLocked
from txbox.postgres.drivers.own_adapters import own_cursors
from txbox.postgres.engines import discard_if_session_broken
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import INSUFFICIENT_PRIVILEGE, LOCK_NOT_AVAILABLE, QUERY_CANCELED, sqlstate
from txbox.text import text_of

STATEMENT_MILLISECONDS = 250
"""How long one statement may take. It bounds the cost of a page where the planner's estimate is far off."""

LOCK_MILLISECONDS = 50
"""How long a page waits for a table that another session has locked."""

T = TypeVar("T")


class ReaderStatements(SqlFile, file="reader.sql"):
    bound_time: str


class Reader:
    """Reads for one page. Nothing connects before the first read."""

    def __init__(self, engine: Engine, schema: str | None, prefix: str) -> None:
        self.engine = engine
        self.schema = schema
        self.prefix = prefix
        self.seconds = 0.0
        """How long the database has taken so far."""
        self.left_out: dict[str, str] = {}
        """What could not be read, with the reason in words. The page must not say that there is none of it."""

    def rows(
        self, what: str, statement: str, parameters: Mapping[str, Any] | None = None
    ) -> Sequence[RowMapping] | None:
        """Return a statement's rows, or None if they cannot be read in time. ``what`` names them in ``left_out``."""
        return self.read(what, lambda connection: _rows(connection, statement, parameters))

    def read(self, what: str, work: Callable[[Connection], T]) -> T | None:
        """Return what ``work`` reads in a read-only transaction, or None if it cannot be read in time.

        Raises:
            SchemaMissing: the tables do not exist.
            DBAPIError: the database cannot be used.
        """
        begun = time.perf_counter()
        try:
            return self._bounded(work)
        except RightsMissing as error:
            self.left_out[what] = str(error)
        except TableLocked:
            self.left_out[what] = _WHY[LOCK_NOT_AVAILABLE]
        except DBAPIError as error:
            why = _why(error)
            if why is None:
                raise
            self.left_out[what] = why
        finally:
            self.seconds += time.perf_counter() - begun
        return None

    def _bounded(self, work: Callable[[Connection], T]) -> T:
        limits = {"milliseconds": str(STATEMENT_MILLISECONDS), "lock_milliseconds": str(LOCK_MILLISECONDS)}
        with self.engine.connect() as connection:
            connection.execution_options(isolation_level="READ COMMITTED", postgresql_readonly=True)
            try:
                with own_cursors(connection), connection.begin():
                    connection.exec_driver_sql(ReaderStatements.load().bound_time, limits)
                    return work(connection)
            except Exception as error:
                discard_if_session_broken(connection, error)
                raise


def _rows(connection: Connection, statement: str, parameters: Mapping[str, Any] | None) -> Sequence[RowMapping]:
    # Without parameters, psycopg would not read %% as %.
    return connection.exec_driver_sql(statement, dict(parameters or {})).mappings().all()


def _why(error: DBAPIError) -> str | None:
    """Return why something is left out, or None if the page cannot be shown at all."""
    code = sqlstate(error) or ""
    if code == INSUFFICIENT_PRIVILEGE:  # Postgres names the table
        said, _, _ = text_of(error.orig or error).partition("\n")
        return f"this user of the database may not read it: {said}"
    return _WHY.get(code)


_WHY = {QUERY_CANCELED: "not read in time", LOCK_NOT_AVAILABLE: "another session has locked the table"}
