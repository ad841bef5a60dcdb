"""For coroutines: the inbox, the outbox, watermarks and entities with methods to await.

Each class only calls its sync counterpart in a greenlet (``txbox.postgres.drivers.greenlets``), so the statements,
answers and errors are the same.
"""

from typing import TYPE_CHECKING

from txbox.coroutines.inbox import AsyncInbox
from txbox.coroutines.outbox import AsyncOutbox
from txbox.coroutines.watermarks import AsyncWatermarks
from txbox.lazy_names import lazy_names

if TYPE_CHECKING:
    from txbox.coroutines.entity import async_update_if_newer, async_update_once
else:  # mapped classes need sqlalchemy.orm
    __getattr__, __dir__ = lazy_names(
        __name__, dict.fromkeys(("async_update_if_newer", "async_update_once"), "txbox.coroutines.entity")
    )

__all__ = ["AsyncInbox", "AsyncOutbox", "AsyncWatermarks", "async_update_if_newer", "async_update_once"]
