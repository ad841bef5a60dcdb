"""The notifier: wakes idle relays by a NOTIFY when a connection that has published returns to its pool.

NOTIFY locks the whole database until its transaction has committed, so inside business transactions it would make them
commit one after the other. Here it is a transaction of its own, on the same connection, after the business transaction
has ended. A relay that was woken polls every few milliseconds for a while, so a pool notifies at most a few times a
second. It is only a hint: without it, an idle relay polls the outbox about twice a second.
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
"""The channel that relays listen on."""

NOTIFY_SECONDS = 0.25
"""The shortest time between two notifications of a pool. A relay that was woken stays awake longer."""


def notify_when_returned(connection: Connection) -> None:
    """Notify relays when this connection returns to its pool; this costs nothing now."""
    if is_psycopg(connection):  # if it has a pool, it is not ours to listen to
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
        """Notify if the connection has published since its checkout; if that fails, make the pool replace it."""
        if not record.info.pop(_PUBLISHED, False) or dbapi_connection is None:
            return
        if self._is_async and not in_greenlet():  # nothing can be awaited here: the connection is being closed
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
            # A hint that failed is no reason to fail what has committed. If a listener raised anything, SQLAlchemy's
            # pool would lose the connection's place for good.
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
