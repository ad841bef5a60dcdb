"""The state of a database: what is processed, in flight, to be sent or parked, and which bulk loads are held up."""

from txbox.status.blocked_loads import BlockedLoad, find_blocked_loads
from txbox.status.status import EXACT_UP_TO_ROWS, HandlerConflict, Status, SubscriberStatus, read_status

__all__ = [
    "EXACT_UP_TO_ROWS",
    "BlockedLoad",
    "HandlerConflict",
    "Status",
    "SubscriberStatus",
    "find_blocked_loads",
    "read_status",
]
