"""The spans of processing: one for each message, or one for all that a batch handler is given.

A span begins when its message is begun, and ends with its outcome; a transaction that is run again is an event on it.
A message that was recognised without a handler's run has a span of no length.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from txbox import Message, Outcome
from txbox.tracing import NO_SPAN, NO_TRACING, Operation, Span, Tracing, error_type
from txbox_workers.delivery import Delivery, Settlement

OUTCOME = "txbox.outcome"
RETRY_EVENT = "txbox.transaction_retried"


class ProcessSpans:
    """The spans of one processor. Each thread has its own batch."""

    def __init__(self, tracing: Tracing, source: str, subscriber_id: str) -> None:
        self._tracing = tracing
        self._source = source
        self._subscriber_id = subscriber_id
        self._of_thread = threading.local()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """While entered, this thread processes a batch; what has no outcome at the end has ended with the error."""
        if not self._tracing.enabled:
            yield
            return
        mine = self._of_thread.spans = _BatchSpans()
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            for span in mine.all():
                span.end(None if error is None else error_type(error), {OUTCOME: Outcome.IN_FLIGHT.value})

    def handled(self, delivery: Delivery) -> AbstractContextManager[object]:
        """Return what makes the span of a message the current one, while entered."""
        if not self._tracing.enabled:
            return NO_SPAN.current()
        mine = self._mine()
        span = mine.single.get(delivery.receipt)
        if span is None:
            span = mine.single[delivery.receipt] = self._begin([delivery.message], batch=False)
        return span.current()

    def handled_together(self, deliveries: Sequence[Delivery]) -> AbstractContextManager[object]:
        """Return what makes the span of these messages the current one, while entered; for a batch handler."""
        if not self._tracing.enabled:
            return NO_SPAN.current()
        mine = self._mine()
        if len(deliveries) == 1 and deliveries[0].receipt in mine.single:
            return mine.single[deliveries[0].receipt].current()
        if mine.together is None:
            mine.together = self._begin([delivery.message for delivery in deliveries], batch=True)
        mine.receipts = {delivery.receipt for delivery in deliveries}
        return mine.together.current()

    def retried(self, attributes: Mapping[str, str | int]) -> None:
        """Note on the open spans of this thread that the database has rolled their transaction back."""
        if self._tracing.enabled:
            for span in self._mine().all():
                span.event(RETRY_EVENT, attributes)

    def failed_together(self, error: BaseException) -> None:
        """Note that a batch was rolled back, and that its messages are processed singly."""
        if not self._tracing.enabled:
            return
        mine = self._mine()
        if mine.together is not None:
            mine.together.end(error_type(error), {OUTCOME: Outcome.FAILED.value})
            mine.together, mine.receipts = None, set()
        else:
            for span in mine.single.values():
                span.event("txbox.batch_rolled_back", {"error.type": error_type(error)})

    def settled(self, settlements: Sequence[Settlement]) -> None:
        """End the spans of messages that have an outcome."""
        if not self._tracing.enabled:
            return
        mine = self._mine()
        together, receipts = mine.together, mine.receipts
        for settlement in settlements:
            outcome, receipt = settlement.outcome, settlement.delivery.receipt
            span = mine.single.pop(receipt, None)
            if span is None:
                if receipt in receipts and outcome is Outcome.PROCESSED:
                    continue  # in the span of the batch
                if outcome is Outcome.IN_FLIGHT and settlement.error is None:
                    continue  # not begun
                span = self._begin([settlement.delivery.message], batch=False)
            span.end(_failure(settlement), {OUTCOME: outcome.value})
        if together is not None and any(settlement.delivery.receipt in receipts for settlement in settlements):
            together.end(None, {OUTCOME: Outcome.PROCESSED.value})
            mine.together, mine.receipts = None, set()

    def _begin(self, messages: Sequence[Message], *, batch: bool) -> Span:
        return self._tracing.messaging(
            Operation.PROCESS, self._source, messages, subscriber_id=self._subscriber_id, batch=batch
        )

    def _mine(self) -> "_BatchSpans":
        mine = getattr(self._of_thread, "spans", None)
        if mine is None:
            mine = self._of_thread.spans = _BatchSpans()
        return mine


class _BatchSpans:
    """The open spans of one batch."""

    def __init__(self) -> None:
        self.single: dict[str, Span] = {}  # by the receipt of the delivery
        self.together: Span | None = None  # of what a batch handler was given
        self.receipts: set[str] = set()  # of the deliveries in that one

    def all(self) -> list[Span]:
        return [*self.single.values(), *([] if self.together is None else [self.together])]


def _failure(settlement: Settlement) -> str | None:
    """Return what ``error.type`` is to be; None if the message has not failed."""
    if settlement.outcome in _NO_FAILURES:
        return None
    if settlement.error is not None:
        return error_type(settlement.error)
    return settlement.outcome.value if settlement.outcome in _REFUSED else None


_NO_FAILURES = (Outcome.PROCESSED, Outcome.DUPLICATE)
_REFUSED = (Outcome.MISMATCH, Outcome.EXPIRED)

NO_SPANS = ProcessSpans(NO_TRACING, "", "")
