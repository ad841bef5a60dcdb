"""What a processor is given by the worker or the Lambda function that runs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from txbox.instrumentation import Hook
from txbox_workers.processing.transaction_limits import TimeLimit, unlimited


class Halt(Protocol):
    """Says when nothing more is to be begun: a ``threading.Event``, or a deadline."""

    def is_set(self) -> bool:
        """Whether that is now."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, so many seconds at most; return whether it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorContext:
    """Where a processor runs.

    Attributes:
        source_name: where deliveries come from, for events and dead letters.
        hooks: called with every event.
        wants_details: whether a hook or the log takes the events of messages that succeed.
        stopping: says when nothing more is to be begun.
        cut_short: within a batch, begin no more handlers once this is set: what was not begun is taken out of the
            inbox again, and the rest commits. None: batches are always finished.
        ends_at: a reading of ``elapsed`` at which this process ends, and no lease may last longer; None: never.
        limit: says how long a transaction may take.
    """

    source_name: str
    hooks: Sequence[Hook]
    wants_details: Callable[[], bool]
    stopping: Halt
    cut_short: Halt | None = None
    ends_at: Callable[[], float | None] = lambda: None
    limit: TimeLimit = unlimited
