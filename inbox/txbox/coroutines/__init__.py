"""For coroutines: inbox, outbox, watermarks and entities again, whose methods are awaited.

Each does nothing but to call the class for functions in a greenlet (``txbox.postgres.drivers.greenlets``): the same
statements, answers and errors.
"""

from txbox.coroutines.entity import async_update_if_newer, async_update_once
from txbox.coroutines.inbox import AsyncInbox
from txbox.coroutines.outbox import AsyncOutbox
from txbox.coroutines.watermarks import AsyncWatermarks

__all__ = ["AsyncInbox", "AsyncOutbox", "AsyncWatermarks", "async_update_if_newer", "async_update_once"]
