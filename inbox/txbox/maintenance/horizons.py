"""Horizons: check the windows, and move the horizons with them, before anything is deleted."""

import logging
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Engine

from txbox.errors import InvalidConfiguration
from txbox.maintenance.retention import EVERY_SUBSCRIBER, Retention
from txbox.maintenance.transactions import MaintenanceStatements, MaintenanceTransactions
from txbox.postgres.server import SERVER
from txbox.postgres.transactions import short_transaction

LONGEST_OF_SQS = timedelta(days=14)
"""How long SQS can keep a message: the retention to assume for a queue that no worker has reported."""


class Horizons:
    """The horizons of a database's subscribers, by the windows of one retention."""

    def __init__(
        self,
        engine: Engine,
        transactions: MaintenanceTransactions,
        statements: MaintenanceStatements,
        retention: Retention,
        *,
        force: bool,
    ) -> None:
        """Store the database and the windows; ``force`` accepts windows shorter than a queue keeps its messages."""
        self._engine = engine
        self._transactions = transactions
        self._sql = statements
        self._retention = retention
        self._force = force
        self._warned: dict[str, str] = {}

    def check(self, connection: Connection) -> None:
        """Refuse windows that are too short, or warn of them if they are forced.

        Raises:
            InvalidConfiguration: a window is shorter than the subscriber's queue keeps a message.
        """
        found = self.of_inbox(connection)
        if unknown := {*self._retention.inbox} - {*found, EVERY_SUBSCRIBER}:
            _log.warning(
                "there is a window for %s, and the inbox has nothing of that subscriber: is it spelled so?",
                min(unknown),
            )
        windows = {**self._retention.inbox, **found}
        problems = self._too_short(connection, windows)
        if self._retention.leases is not None:
            problems |= self._too_short(connection, self.of_leases(connection) or {"*": self._retention.leases})
        for problem in problems.values():
            if not self._force:
                raise InvalidConfiguration(
                    f"{problem}; a copy that comes later would be run again if its age is not known. Keep ids for "
                    "longer, or insist on it with --force (Maintainer(force=True))"
                )
            _log.warning("%s; it is forced: a copy of unknown age that comes later is run again", problem)

    def move(self, connection: Connection) -> tuple[Mapping[str, timedelta], Mapping[str, timedelta]]:
        """Move the horizons, and return the allowed windows of inbox and leases, by subscriber.

        The move takes effect when the transaction commits; delete nothing before that.
        """
        inbox = self._allowed(connection, self.of_inbox(connection))
        leases = self._allowed(connection, self.of_leases(connection))
        both = {name: min(of[name] for of in (inbox, leases) if name in of) for name in {*inbox, *leases}}
        if both:
            names = sorted(both)
            windows = [both[name].total_seconds() for name in names]
            connection.exec_driver_sql(self._sql.move_horizons, {"subscriber_ids": names, "windows": windows})
        return inbox, leases

    def settle(self, *, wait_seconds: float) -> Mapping[str, float]:
        """Return the horizons up to which rows may be deleted, by subscriber, in seconds since 1970.

        A transaction that began before a horizon was committed may not see it, and could record an id that is deleted
        meanwhile. So a horizon counts only when every transaction that was running after its commit has ended; until
        then, the previous horizon counts. The transactions to wait for are kept in the table of maintenance, and later
        rounds go on waiting for them.

        Args:
            wait_seconds: how long to wait for running transactions.
        """
        detail, _ = self._transactions.read(_TASK)
        if not detail.get("waits_for"):
            detail = self._transactions.run(lambda connection: self._begin_settling(connection, detail))
        until, pause = time.monotonic() + wait_seconds, 0.01
        while detail["waits_for"]:
            with short_transaction(self._engine) as connection:
                running = connection.exec_driver_sql(
                    self._sql.still_running, {"virtualxids": detail["waits_for"]}
                ).all()
            detail["waits_for"] = [one.virtualxid for one in running]
            if running and time.monotonic() >= until:
                pids = ", ".join(str(one.pid) for one in running[:5])
                _log.warning(
                    "transactions that began before the horizon moved are still running, so nothing more is forgotten; "
                    "end them, or wait: server processes %s",
                    pids,
                )
                break
            if running:
                self._transactions.pause(pause)
                pause = min(pause * 2, 0.5)
        if not detail["waits_for"]:
            detail["settled"] = detail["moved"]
        self._transactions.run(lambda connection: self._transactions.progress(connection, _TASK, 0, detail))
        return dict(detail.get("settled", {}))

    def _begin_settling(self, connection: Connection, detail: dict[str, Any]) -> dict[str, Any]:
        """Store the horizons, and then, in a separate statement, the running transactions."""
        moved = {one.subscriber_id: one.seconds for one in connection.exec_driver_sql(self._sql.horizons)}
        if moved == detail.get("settled"):
            return {**detail, "moved": moved, "waits_for": []}
        running = list(connection.exec_driver_sql(SERVER.running_transactions).scalars())
        detail = {**detail, "moved": moved, "waits_for": running}
        self._transactions.progress(connection, _TASK, 0, detail)
        return detail

    def without_window(self, connection: Connection, windows: Mapping[str, timedelta]) -> list[str]:
        return [
            name for name in connection.exec_driver_sql(self._sql.inbox_subscribers).scalars() if name not in windows
        ]

    def of_inbox(self, connection: Connection) -> dict[str, timedelta]:
        """Return the window of each subscriber of the inbox that has one."""
        if not self._retention.inbox:
            return {}
        names = connection.exec_driver_sql(self._sql.inbox_subscribers).scalars()
        return {name: window for name in names if (window := self._retention.of_inbox(name)) is not None}

    def of_leases(self, connection: Connection) -> dict[str, timedelta]:
        """Return the window of each subscriber that has leases, if leases have one."""
        if (window := self._retention.leases) is None:
            return {}
        return dict.fromkeys(connection.exec_driver_sql(self._sql.lease_subscribers).scalars(), window)

    def _allowed(self, connection: Connection, windows: Mapping[str, timedelta]) -> Mapping[str, timedelta]:
        """Leave out subscribers whose queue keeps messages longer; a worker may report that at any time."""
        if self._force or not windows:
            return windows
        problems = self._too_short(connection, windows)
        for name, problem in problems.items():
            if self._warned.get(name) != problem:
                self._warned[name] = problem
                _log.error("%s; nothing of %s is forgotten", problem, name)
        return {name: window for name, window in windows.items() if name not in problems}

    def _too_short(self, connection: Connection, windows: Mapping[str, timedelta]) -> dict[str, str]:
        """Return, by subscriber, what is wrong with windows that are shorter than a queue keeps messages."""
        reported = {one.subscriber_id: one.seconds for one in connection.exec_driver_sql(self._sql.source_retentions)}
        problems = {}
        for name, window in windows.items():
            kept = timedelta(seconds=reported[name]) if name in reported else LONGEST_OF_SQS
            if window < kept:
                why = "" if name in reported else " (no worker has reported its queue; SQS can keep them so long)"
                problems[name] = (
                    f"ids of {name} are to be kept for {_days(window)}, and its queue keeps messages for "
                    f"{_days(kept)}{why}"
                )
        return problems


def _days(span: timedelta) -> str:
    days = span / timedelta(days=1)
    return "1 day" if days == 1 else f"{days:,.4g} days"


_TASK = "horizons"
"""The task whose detail says which transactions are waited for."""

_log = logging.getLogger("txbox.maintenance")
