"""The state of a database: what is processed, in flight, to be sent or parked, and which bulk loads are blocked."""

from txbox.status.activity import ActivitySeries, read_activity
from txbox.status.backlogs import InboxBacklog, inbox_backlogs
from txbox.status.bulk_loads import BlockedLoad, find_blocked_loads
from txbox.status.runway import (
    ArchiveStatus,
    GenerationStatus,
    HorizonStatus,
    MaintenanceTask,
    Runway,
    RunwayReporter,
    read_runway,
)
from txbox.status.status import EXACT_UP_TO_ROWS, HandlerConflict, Status, SubscriberStatus, read_status
from txbox.status.workers import WorkerStatus

__all__ = [
    "EXACT_UP_TO_ROWS",
    "ActivitySeries",
    "ArchiveStatus",
    "BlockedLoad",
    "GenerationStatus",
    "HandlerConflict",
    "HorizonStatus",
    "InboxBacklog",
    "MaintenanceTask",
    "Runway",
    "RunwayReporter",
    "Status",
    "SubscriberStatus",
    "WorkerStatus",
    "find_blocked_loads",
    "inbox_backlogs",
    "read_activity",
    "read_runway",
    "read_status",
]
