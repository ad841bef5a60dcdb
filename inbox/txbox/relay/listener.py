"""Listening for the bell, so that an idle relay is awake at once. Only a hint: a relay looks by itself anyway."""

import logging
import threading
import time
from types import TracebackType
from typing import Any

from sqlalchemy import Connection, Engine

from txbox.outbox.notifier import CHANNEL
from txbox.outbox.statements import OutboxStatements

__all__ = ["Listener"]


class Listener:
    """A connection of its own that listens, while entered; or that does not, where it cannot."""

    def __init__(self, engine: Engine, statements: OutboxStatements, *, wanted: bool) -> None:
        """Prepare; entering it connects.

        Args:
            engine: the database.
            statements: those of the outbox.
            wanted: False: only wait.
        """
        self._engine = engine
        self._statements = statements
        self._wanted = wanted
        self._driver: Any = None
        self._connection: Connection | None = None

    def __enter__(self) -> "Listener":
        if not self._wanted or self._engine.dialect.driver != "psycopg":
            return self
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            driver = connection.connection.driver_connection
            assert driver is not None  # noqa: S101 - for the type checker
            # A pooler in transaction mode answers for many servers; a LISTEN would stay behind at one of them.
            if connection.exec_driver_sql(self._statements.backend_pid).scalar_one() == driver.info.backend_pid:
                connection.exec_driver_sql(self._statements.no_time_out)
                connection.detach()  # the pool has no use for a connection that listens
                connection.exec_driver_sql(f"LISTEN {CHANNEL}")
                self._driver, self._connection = driver, connection
                return self
            _log.info("a pooler is between relay and database: new messages are looked for, not listened for")
        except BaseException:
            connection.invalidate()
            connection.close()
            raise
        connection.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = self._driver = None

    def drain(self) -> None:
        """Take in what has been rung: the server keeps it for whoever has not, for all of its databases."""
        if self._driver is not None:
            for _ in self._driver.notifies(timeout=0):
                pass

    def wait(self, seconds: float, stopping: threading.Event) -> bool:
        """Wait for the bell, or for a stop, which takes a tenth of a second to be seen; return whether it rang."""
        if self._driver is None:
            stopping.wait(seconds)
            return False
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not stopping.is_set():
            for _ in self._driver.notifies(timeout=min(left, _GLANCE_SECONDS), stop_after=1):
                return True
        return False


_GLANCE_SECONDS = 0.1

_log = logging.getLogger("txbox")
