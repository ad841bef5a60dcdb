"""The reader: runs the statements of one page, each bounded, and knows how long the database took.

A page is read while the database may be busy, locked or partly forbidden. So each read is a transaction of its own that
only reads; what takes too long, waits for a lock, or may not be read is None, and the page says so.
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
"""Of one statement, at most. It bounds what a page costs where an estimate of the planner is far off."""

LOCK_MILLISECONDS = 50
"""A page waits so long for a table that another session has locked."""

T = TypeVar("T")


class ReaderStatements(SqlFile, file="reader.sql"):
    """The statements of ``reader.sql``."""

    bound_time: str


class Reader:
    """Reads for one page."""

    def __init__(self, engine: Engine, schema: str | None, prefix: str) -> None:
        """Prepare; nothing is connected before the first read.

        Args:
            engine: the database.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
        """
        self.engine = engine
        self.schema = schema
        self.prefix = prefix
        self.seconds = 0.0
        """How long the database has taken so far."""
        self.left_out: dict[str, str] = {}
        """What could not be read, and why; in words. Of these a page says nothing else, not that there is none."""

    def rows(
        self, what: str, statement: str, parameters: Mapping[str, Any] | None = None
    ) -> Sequence[RowMapping] | None:
        """Return the rows of a statement, or None; ``what`` names them for people where they are left out."""
        return self.read(what, lambda connection: _rows(connection, statement, parameters))

    def read(self, what: str, work: Callable[[Connection], T]) -> T | None:
        """Return what a function reads in a transaction that only reads; None if that is not possible in time.

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
    # Without parameters, psycopg would not read %% as one %.
    return connection.exec_driver_sql(statement, dict(parameters or {})).mappings().all()


def _why(error: DBAPIError) -> str | None:
    """Return why something is left out; None: the page cannot be shown at all."""
    code = sqlstate(error) or ""
    if code == INSUFFICIENT_PRIVILEGE:  # Postgres names the table
        said, _, _ = text_of(error.orig or error).partition("\n")
        return f"this user of the database may not read it: {said}"
    return _WHY.get(code)


_WHY = {QUERY_CANCELED: "not read in time", LOCK_NOT_AVAILABLE: "another session has locked the table"}
