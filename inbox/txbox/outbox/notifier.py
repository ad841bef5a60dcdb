"""The notifier: wakes idle relays by a NOTIFY when a connection that has published goes back to its pool.

NOTIFY takes a lock on the whole database to the end of its transaction's commit, so within business transactions it
has them commit one after the other. Here it is a transaction of its own, on the same connection, after the business
transaction has ended. A relay that was woken polls every few milliseconds for a while, so a pool notifies at most a few
times a second. It is only a hint: without it, an idle relay polls the outbox about twice a second.
"""

import asyncio
import logging
import threading
import time
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Pool, event

from txbox.postgres.drivers.greenlets import cancel_later, in_greenlet
from txbox.postgres.drivers.psycopg_connection import is_psycopg

CHANNEL = "txbox_outbox"
"""What relays listen on."""

NOTIFY_SECONDS = 0.25
"""Between two notifications of a pool, at least. A relay that was woken stays awake for longer."""


def notify_when_returned(connection: Connection) -> None:
    """Have relays notified when this connection goes back to its pool; costs nothing now."""
    if is_psycopg(connection):  # its pool, if there is one, is not ours to listen to
        return
    pool = connection.engine.pool
    if pool not in _notifiers:
        with _lock:
            if pool not in _notifiers:
                _notifiers[pool] = notifier = _Notifier(connection.dialect.is_async)
                event.listen(pool, "checkin", notifier.returned)
    connection.info[_PUBLISHED] = True


class _Notifier:
    def __init__(self, is_async: bool) -> None:
        self._is_async = is_async
        self._lock = threading.Lock()
        self._notified_at = -NOTIFY_SECONDS

    def returned(self, dbapi_connection: Any, record: Any) -> None:
        """Notify, if the connection has published since it was taken; if that fails, the pool replaces it."""
        if not record.info.pop(_PUBLISHED, False) or dbapi_connection is None:
            return
        if self._is_async and not in_greenlet():  # an event loop has no time for it now: it is being closed
            return
        now = time.monotonic()
        with self._lock:
            if now - self._notified_at < NOTIFY_SECONDS:
                return
            self._notified_at = now
        try:
            cursor = dbapi_connection.cursor()
            cursor.execute(f"NOTIFY {CHANNEL}")
            cursor.close()
            dbapi_connection.commit()
        except BaseException as error:
            # A hint that was not given is no reason to fail what has committed. SQLAlchemy's pool would lose the
            # connection's place for good, if a listener raised anything.
            _log.debug("NOTIFY %s failed; an idle relay finds the message at its next poll", CHANNEL, exc_info=True)
            record.invalidate()
            if isinstance(error, asyncio.CancelledError):
                cancel_later()
            elif not isinstance(error, Exception):
                raise


_PUBLISHED = "txbox_published"
_lock = threading.Lock()
_notifiers: "WeakKeyDictionary[Pool, _Notifier]" = WeakKeyDictionary()

_log = logging.getLogger("txbox.outbox")
