"""The spans of a consumer: of what it receives, processes, and settles.

A worker's poll that has brought messages is a span, and what becomes of them is within it. If that span is not
recorded, as most are where a sampler takes one in ten, no others are asked for: each costs 20 us for nothing.

There is a span for each message, or one for all that a batch handler is given. It begins when its message is begun, and
ends with its outcome, which it says unless the message is processed; a transaction that is run again is an event on it.
A message that was recognised without a handler's run has a span of no length.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from txbox import Outcome
from txbox.tracing import NO_SPAN, NO_TRACING, Operation, Span, Tracing, error_type
from txbox_workers.delivery import Delivery, Settlement

OUTCOME = "txbox.outcome"
RETRY_EVENT = "txbox.transaction_retried"


class ConsumerSpans:
    """The spans of one consumer. Each thread, and each task of an event loop, has its own batch."""

    def __init__(self, tracing: Tracing, source: str, subscriber_id: str) -> None:
        self._tracing = tracing
        self._source = source
        self._subscriber_id = subscriber_id
        # Made here, and not for the module: a thread may work for several consumers, one after the other.
        self._recorded: ContextVar[bool] = ContextVar("txbox_recorded", default=True)
        self._spans: ContextVar[_BatchSpans | None] = ContextVar("txbox_spans", default=None)

    def received(self, deliveries: Sequence[Delivery], began_ns: int) -> AbstractContextManager[object]:
        """Return what to enter while this thread works on what a poll has brought, which began then.

        What becomes of it is within the poll's span, until the thread's next poll. Polls that bring nothing have none:
        they would be most of all spans, and say nothing.
        """
        if not self._tracing.enabled:
            return NO_SPAN.current()
        span = self._begin(Operation.RECEIVE, deliveries, began_ns=began_ns)
        self._recorded.set(span.recording)
        span.end()
        return span.current()

    def resume(self, recorded: bool) -> None:
        """This thread settles what others have processed; whether spans are wanted of that."""
        self._recorded.set(recorded)

    def settling(self, name: str, deliveries: Sequence[Delivery]) -> AbstractContextManager[object]:
        """Return what to enter while deliveries are acked or handed back, as the name says."""
        return self._settling(name, deliveries) if self.recorded else NO_SPAN.current()

    @contextmanager
    def _settling(self, name: str, deliveries: Sequence[Delivery]) -> Iterator[None]:
        span = self._begin(Operation.SETTLE, deliveries, name=name)
        try:
            with span.current():
                yield
        except BaseException as error:
            span.end(error_type(error))
            raise
        span.end()

    def batch(self) -> AbstractContextManager[object]:
        """Return what to enter while this thread processes a batch.

        What has no outcome at the end has ended with the error.
        """
        return self._batch() if self.recorded else NO_SPAN.current()

    @contextmanager
    def _batch(self) -> Iterator[None]:
        mine = _BatchSpans()
        self._spans.set(mine)
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
        if not self.recorded:
            return NO_SPAN.current()
        mine = self._mine()
        span = mine.single.get(delivery.receipt)
        if span is None:
            span = mine.single[delivery.receipt] = self._begin(Operation.PROCESS, [delivery], batch=False)
        return span.current()

    def handled_together(self, deliveries: Sequence[Delivery]) -> AbstractContextManager[object]:
        """Return what makes the span of these messages the current one, while entered; for a batch handler."""
        if not self.recorded:
            return NO_SPAN.current()
        mine = self._mine()
        if len(deliveries) == 1 and deliveries[0].receipt in mine.single:
            return mine.single[deliveries[0].receipt].current()
        if mine.together is None:
            mine.together = self._begin(Operation.PROCESS, deliveries)
        mine.receipts = {delivery.receipt for delivery in deliveries}
        return mine.together.current()

    def retried(self, attributes: Mapping[str, str | int]) -> None:
        """Note on the open spans of this thread that the database has rolled their transaction back."""
        if self.recorded:
            for span in self._mine().all():
                span.event(RETRY_EVENT, attributes)

    def failed_together(self, error: BaseException) -> None:
        """Note that a batch was rolled back, and that its messages are processed singly."""
        if not self.recorded:
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
        if not self.recorded:
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
                span = self._begin(Operation.PROCESS, [settlement.delivery], batch=False)
            span.end(_failure(settlement), None if outcome is Outcome.PROCESSED else {OUTCOME: outcome.value})
        if together is not None and any(settlement.delivery.receipt in receipts for settlement in settlements):
            together.end()
            mine.together, mine.receipts = None, set()

    def _begin(
        self,
        operation: Operation,
        deliveries: Sequence[Delivery],
        *,
        name: str | None = None,
        batch: bool = True,
        began_ns: int | None = None,
    ) -> Span:
        messages = [delivery.message for delivery in deliveries]
        return self._tracing.messaging(
            operation,
            self._source,
            messages,
            name=name,
            subscriber_id=self._subscriber_id,
            batch=batch,
            began_ns=began_ns,
        )

    @property
    def recorded(self) -> bool:
        """Whether spans are wanted: not within a poll's that is not recorded."""
        return self._tracing.enabled and self._recorded.get()

    def _mine(self) -> "_BatchSpans":
        mine = self._spans.get()
        if mine is None:
            mine = _BatchSpans()
            self._spans.set(mine)
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

NO_SPANS = ConsumerSpans(NO_TRACING, "", "")
