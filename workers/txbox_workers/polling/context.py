"""What the parts of a worker's polling share."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from txbox.backoff import Backoff
from txbox_workers.consumer_spans import ConsumerSpans
from txbox_workers.delivery import Source
from txbox_workers.polling.activity import Activity
from txbox_workers.processing import Processor
from txbox_workers.visibility_heartbeat import VisibilityHeartbeat

OUTAGE_BACKOFF = Backoff(first_seconds=0.5, longest_seconds=30.0)
"""The delay between tries while the broker or the database cannot be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PollingContext:
    """One worker, as the parts of its polling see it."""

    subscriber_id: str
    source: Source
    processor: Processor
    heartbeat: VisibilityHeartbeat
    spans: ConsumerSpans
    activity: Activity
    stopping: threading.Event  # set when the worker stops
    emit: Callable[..., None]  # emits an event, given its class and attributes
    wants_details: Callable[[], bool]  # whether a hook or the log takes the events of messages that succeed
    give_way: Callable[[], None]  # between two transactions, to a report that waits for a connection


def outage_seconds(tries: int) -> float:
    """Return how many seconds to wait after this many tries."""
    return OUTAGE_BACKOFF.seconds(tries)
