"""The task that drops the staging tables that no bulk load needs."""

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox.maintenance.staging_tables import StagingCatalogue
from txbox.maintenance.transactions import MaintenanceTransactions
from txbox.postgres.sqlstates import is_outage


class StagingSweeper:
    """Drops the staging tables of runs that are finished, forgotten, or were left for long enough."""

    def __init__(
        self,
        transactions: MaintenanceTransactions,
        catalogue: StagingCatalogue,
        *,
        window: timedelta | None,
        stopping: Callable[[], bool],
    ) -> None:
        """Name the tables; ``window``: for how long a run that was left keeps its own; None: for ever."""
        self._transactions = transactions
        self._catalogue = catalogue
        self._window = window
        self._stopping = stopping

    def abandoned(self, connection: Connection) -> list[str]:
        """Return the tables that would be dropped now."""
        return self._catalogue.abandoned(connection, None if self._window is None else self._window.total_seconds())

    def drop_all(self) -> int:
        """Drop them, and return how many; one that cannot be dropped keeps none of the others."""
        dropped, refused = 0, None
        for table in self._transactions.run(self.abandoned):
            if self._stopping():
                break
            try:
                self._drop(table)
            except DBAPIError as error:
                if is_outage(error):
                    raise
                refused = error
            else:
                dropped += 1
        if refused is not None:
            raise refused
        return dropped

    def _drop(self, table: str) -> None:
        for drop in self._transactions.run(lambda connection: self._catalogue.drops(connection, table)):
            self._transactions.run(partial(Connection.exec_driver_sql, statement=drop))
        self._transactions.run(lambda connection: self._transactions.progress(connection, "staging", 1, {}))
        _log.info("staging: dropped %s", table)


_log = logging.getLogger("txbox.maintenance")
