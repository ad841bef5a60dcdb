"""The bell: wakes idle relays when a connection that has published goes back to its pool.

NOTIFY takes a lock on the whole database to the end of its transaction's commit, so within business transactions it has
them commit one after the other. Here it is a transaction of its own, on the same connection, after the business
transaction has ended; and as a relay that was woken looks for messages every few milliseconds for a while, a pool
rings at most a few times a second, however much is published.

It is only a hint. Whatever rings in vain, or forgets to, an idle relay looks at the outbox by itself twice a second.
"""

import logging
import threading
import time
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Pool, event

__all__ = ["CHANNEL", "RING_SECONDS", "ring_when_returned"]

CHANNEL = "txbox_outbox"
"""What relays listen on."""

RING_SECONDS = 0.25
"""At least so long from one ring of a pool to its next one. A relay that was woken is awake for longer."""


def ring_when_returned(connection: Connection) -> None:
    """Have the bell rung when this connection goes back to its pool; costs nothing now."""
    if connection.dialect.is_async:
        return
    pool = connection.engine.pool
    if pool not in _bells:
        with _lock:
            if pool not in _bells:
                _bells[pool] = bell = _Bell()
                event.listen(pool, "checkin", bell.returned)
    connection.info[_PUBLISHED] = True


class _Bell:
    """The bell of one pool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rung_at = -RING_SECONDS

    def returned(self, dbapi_connection: Any, record: Any) -> None:
        """Ring, if the connection has published since it was taken; whatever happens, the pool gets it back sound."""
        if not record.info.pop(_PUBLISHED, False) or dbapi_connection is None:
            return
        now = time.monotonic()
        with self._lock:
            if now - self._rung_at < RING_SECONDS:
                return
            self._rung_at = now
        try:
            cursor = dbapi_connection.cursor()
            cursor.execute(f"NOTIFY {CHANNEL}")
            cursor.close()
            dbapi_connection.commit()
        except Exception:  # noqa: BLE001 - a hint that was not given is no reason to fail what has committed
            _log.debug("relays could not be woken; they look by themselves", exc_info=True)
            record.invalidate()


_PUBLISHED = "txbox_published"
_lock = threading.Lock()
_bells: "WeakKeyDictionary[Pool, _Bell]" = WeakKeyDictionary()

_log = logging.getLogger("txbox")
