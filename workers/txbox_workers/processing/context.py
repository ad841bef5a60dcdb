"""What a processor is given by the worker or the Lambda function that runs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from txbox.instrumentation import Hook
from txbox_workers.consumer_spans import NO_SPANS, ConsumerSpans
from txbox_workers.processing.transaction_limits import TimeLimit, unlimited


class Halt(Protocol):
    """Says when nothing more is to be begun: a ``threading.Event``, or a deadline."""

    def is_set(self) -> bool:
        """Whether that is now."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, so many seconds at most; return whether it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorContext:
    """Where a processor runs."""

    subscriber_id: str  # whose messages are processed
    source_name: str  # where deliveries come from, for events and dead letters
    hooks: Sequence[Hook]  # called with every event
    wants_details: Callable[[], bool]  # whether a hook or the log takes the events of messages that succeed
    stopping: Halt  # says when nothing more is to be begun
    cut_short: Halt | None = None
    """Within a batch, begin no more handlers once this is set: what was not begun is taken out of the inbox again, and
    the rest commits. None: batches are always finished.
    """
    ends_at: Callable[[], float | None] = lambda: None
    """A reading of ``elapsed`` at which this process ends, and no lease may last longer; None: never."""
    spans: ConsumerSpans = NO_SPANS  # of the messages that are processed
    limit: TimeLimit = unlimited  # says how long a transaction may take
