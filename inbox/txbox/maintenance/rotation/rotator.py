"""The task that rotates an inbox: opens a generation when one is due, and drops those that are forgotten."""

import logging
from collections.abc import Mapping
from datetime import timedelta

from sqlalchemy import Connection, Engine

from txbox.maintenance.horizons import Horizons
from txbox.maintenance.rotation.generations import Generations
from txbox.maintenance.tasks import SLACK
from txbox.maintenance.transactions import MaintenanceStatements, MaintenanceTransactions
from txbox.postgres.transactions import short_transaction

ROTATION_TRIES = 5
"""How often one round tries to lock a rotating inbox; the next round tries again."""


class Rotator:
    def __init__(
        self,
        engine: Engine,
        transactions: MaintenanceTransactions,
        statements: MaintenanceStatements,
        horizons: Horizons,
        generations: Generations,
        *,
        generation_count: int,
    ) -> None:
        """Store the collaborators; a generation is due after the longest window divided by ``generation_count - 1``."""
        self._engine = engine
        self._transactions = transactions
        self._sql = statements
        self._horizons = horizons
        self._generations = generations
        self._generation_count = generation_count
        self._prevented: str | None = None

    def rows_to_drop(self, windows: Mapping[str, timedelta]) -> int:
        """Return about how many rows are in generations that were closed before the longest window began."""
        with short_transaction(self._engine) as connection:
            if self._horizons.without_window(connection, windows):
                return 0
            age = timedelta(seconds=float(connection.exec_driver_sql(self._sql.generation_seconds).scalar_one()))
        *closed, current = self._generations.list()
        until = current.opened_at + age - max(windows.values()) - SLACK
        return sum(one.rows for one in closed if one.closed_at and one.closed_at < until)

    def rotate(self, windows: Mapping[str, timedelta], settled: Mapping[str, float]) -> int:
        """Open a generation if one is due, drop forgotten ones, and return about how many rows they had."""
        longest = max(windows.values(), default=timedelta.max)
        every_seconds = longest.total_seconds() / (self._generation_count - 1)

        def look(connection: Connection) -> tuple[float, list[str]]:
            age = float(connection.exec_driver_sql(self._sql.generation_seconds).scalar_one())
            return age, self._horizons.without_window(connection, windows)

        age, without = self._transactions.run(look)
        before = self._generations.list()
        most = 2 * self._generation_count
        prevented = None
        if without:
            prevented = (
                f"{len(without)} of the subscribers of the inbox may not be forgotten, {without[0]} first: no "
                "generation can go, so none is opened; give every subscriber a window that is long enough, '*' those "
                "that are not named"
            )
        elif age >= every_seconds and not self._generations.rotate(tries=ROTATION_TRIES, most=most):
            prevented = (
                f"no generation is opened: there are {len(before)}, and more would slow recording down"
                if len(before) >= most
                else "no generation is opened: transactions that use the inbox do not end; it is tried again"
            )
        self._note_prevented(prevented)
        dropped = self._generations.forget(settled=settled, tries=ROTATION_TRIES) if windows else ()
        rows = sum(one.rows for one in before if one.generation in dropped)
        noted = {"every_seconds": every_seconds if windows else None, "prevented_by": prevented}
        self._transactions.run(lambda connection: self._transactions.progress(connection, "rotation", rows, noted))
        return rows

    def _note_prevented(self, why: str | None) -> None:
        """Log what prevents rotation, once until it changes."""
        if why is not None and self._prevented != why:
            _log.error("rotation: %s", why)
        self._prevented = why


_log = logging.getLogger("txbox.maintenance")
