"""The reporter: writes a relay's row in outbox_relay, and deletes sent messages that have been kept long enough."""

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection

from txbox import __version__
from txbox.bounded_memory import Recent
from txbox.outbox.sent_messages import PURGE_ROWS
from txbox.postgres.transactions import unless_locked
from txbox.relay.sender import RelayStatements
from txbox.status.activity import KEPT_DAYS
from txbox.text import host_name, storable

REPORT_SECONDS = 10.0
"""Seconds between reports that this relay is at work."""

SOON_SECONDS = 1.0
"""Seconds until the second report, which has a rate; and between two reports if something has changed."""

PURGE_SECONDS = 0.1
"""Seconds until the next purge while there is more to delete."""

OUTAGES = 20
"""Most unreachable destinations in one report: the latest ones."""

OUTAGE_CHARACTERS = 500
"""Characters kept of each outage's error."""

DESTINATIONS = 100
"""Most destinations in one report: those sent to last."""

OUTAGE_SECONDS = 300.0
"""An outage without a try for this long is not reported: where messages wait, there are two tries a minute."""


class RelayReporter:
    """Keeps a relay's row in outbox_relay, which only the status reads.

    Senders call ``sent_to``, ``lost`` and ``restored``; the poller calls ``set_state`` and ``work``.
    """

    def __init__(
        self,
        relay_id: str,
        statements: RelayStatements,
        purge_sent: Callable[[Connection], int] | None,
        counted_before: tuple[int, int] = (0, 0),
    ) -> None:
        """Make the first report due at once.

        Args:
            relay_id: of the relay.
            statements: for its tables.
            purge_sent: deletes some sent messages; None: they are not kept.
            counted_before: how many messages the relay had sent and how many were refused before it was started again.
        """
        self._relay_id = relay_id
        self._statements = statements
        self._purge_sent = purge_sent
        self._sent_before: int | None = None
        self._counted_before = counted_before
        self._reported_at = time.monotonic()
        self._report_at = self._purge_at = self._reported_at
        self._outages: dict[str, tuple[str, float]] = {}
        self._destinations: Recent[str, int] = Recent(DESTINATIONS)
        self._state = "working"
        self._changes = self._changes_reported = 0
        self._backend_pid: int | None = None
        self._lock = threading.Lock()

    def set_state(self, state: str) -> None:
        """Set the reported state: working, paused if a destination is, or drained."""
        self._changes += state != self._state
        self._state = state

    def sent_to(self, destination: str, messages: int) -> None:
        """Count messages sent to a destination. Any thread may call this."""
        with self._lock:
            self._destinations[destination] = self._destinations.get(destination, 0) + messages

    def lost(self, destination: str, error: str) -> None:
        """Record that a destination cannot be reached, and why. Any thread may call this."""
        error = " ".join(storable(error).split())[:OUTAGE_CHARACTERS]
        with self._lock:
            before = self._outages.pop(destination, None)
            if before is None or before[0] != error:
                self._changes += 1
            self._outages[destination] = error, time.monotonic()
            if len(self._outages) > OUTAGES:
                del self._outages[next(iter(self._outages))]

    def restored(self, destination: str) -> None:
        """Forget a destination's outage, if it had one. Any thread may call this."""
        if destination in self._outages:  # without the lock: it is called for every batch, mostly without an outage
            with self._lock:
                self._changes += self._outages.pop(destination, None) is not None

    def work(self, connection: Connection, sent: int, failed: int) -> None:
        """Do what is due; ``sent`` and ``failed`` count messages since the relay was started."""
        now = time.monotonic()
        # The status recognises a live relay by its session, so a new session is reported at once.
        pid = getattr(getattr(connection.connection.driver_connection, "pgconn", None), "backend_pid", None)
        if now >= self._report_at or self._has_changes(now) or pid != self._backend_pid:
            self._report(connection, sent, failed, now, pid)
        if self._purge_sent is not None and now >= self._purge_at:
            purged = self._purge_sent(connection)
            self._purge_at = now + (PURGE_SECONDS if purged == PURGE_ROWS else REPORT_SECONDS)
        connection.commit()

    def end(self, connection: Connection, sent: int, failed: int) -> None:
        """Report what was sent last, and delete this relay's row and the rows of relays that have died."""
        self._store(connection, self._figures(sent, failed, time.monotonic(), None))
        kept = timedelta(days=KEPT_DAYS)
        connection.exec_driver_sql(self._statements.delete_row, {"relay_id": self._relay_id, "kept": kept})

    def _has_changes(self, now: float) -> bool:
        return self._changes != self._changes_reported and now >= self._reported_at + SOON_SECONDS

    def _report(self, connection: Connection, sent: int, failed: int, now: float, pid: int | None) -> None:
        is_first = self._sent_before is None
        changes = self._changes
        figures = self._figures(sent, failed, now, pid)
        # If the row is locked, it is reported next time: messages do not wait for it.
        unless_locked(
            connection,
            "the report of this relay, which looks as if it were gone",
            lambda: self._store(connection, figures),
        )
        self._sent_before, self._reported_at, self._changes_reported = sent, now, changes
        self._backend_pid = pid
        self._report_at = now + (SOON_SECONDS if is_first else REPORT_SECONDS)

    def _store(self, connection: Connection, figures: dict[str, Any]) -> None:
        connection.exec_driver_sql(self._statements.take_turn, {"relay_id": self._relay_id})
        connection.exec_driver_sql(self._statements.report, figures)

    def _figures(self, sent: int, failed: int, now: float, pid: int | None) -> dict[str, Any]:
        rate = (sent - (self._sent_before or 0)) / max(now - self._reported_at, SOON_SECONDS)
        with self._lock:
            for destination, (_, at) in list(self._outages.items()):
                if at < now - OUTAGE_SECONDS:
                    del self._outages[destination]
            outages = json.dumps({destination: error for destination, (error, _) in self._outages.items()})
            destinations = json.dumps(self._destinations)
        return {
            "relay_id": self._relay_id,
            "host": host_name(),
            "pid": os.getpid(),
            "sent": sent,
            "failed": failed,
            "sent_per_second": rate,
            "outages": outages,
            "backend_pid": pid,
            "version": __version__,
            "state": self._state,
            "destinations": destinations,
            "sent_before": self._counted_before[0],
            "failed_before": self._counted_before[1],
        }
