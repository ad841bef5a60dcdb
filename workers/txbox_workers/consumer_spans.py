"""The tracing spans of a consumer: for receiving, processing and settling messages.

A worker's poll that brings messages is a span, and everything that happens to them is inside it. If the sampler drops
that span, as most do when it keeps one in ten, no other spans are created: each would cost 20 us for nothing.

Each message has a span, or all messages given to a batch handler share one. A span begins when its message's processing
begins and ends with the outcome, which is an attribute unless the message is processed. A transaction that runs again
is an event on the span. A message recognised without running a handler gets a span of no length.
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
        # Not at module level: a thread may work for several consumers, one after the other.
        self._recorded: ContextVar[bool] = ContextVar("txbox_recorded", default=True)
        self._spans: ContextVar[_BatchSpans | None] = ContextVar("txbox_spans", default=None)

    def received(self, deliveries: Sequence[Delivery], began_ns: int) -> AbstractContextManager[object]:
        """Return a context for the work on what a poll brought; the poll began at ``began_ns``.

        What this thread does until its next poll is inside the poll's span. Polls that bring nothing have no span: they
        would be most of all spans, and say nothing.
        """
        if not self._tracing.enabled:
            return NO_SPAN.current()
        span = self._begin(Operation.RECEIVE, deliveries, began_ns=began_ns)
        self._recorded.set(span.recording)
        span.end()
        return span.current()

    def resume(self, recorded: bool) -> None:
        """Set whether this thread records spans while it settles what others have processed."""
        self._recorded.set(recorded)

    def settling(self, name: str, deliveries: Sequence[Delivery]) -> AbstractContextManager[object]:
        """Return a context for acking or handing back deliveries; ``name`` says which."""
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
        """Return a context for processing a batch in this thread.

        Spans without an outcome at the end take the error that ended the batch.
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
        """Return a context in which the message's span is the current one."""
        if not self.recorded:
            return NO_SPAN.current()
        mine = self._mine()
        span = mine.single.get(delivery.receipt)
        if span is None:
            span = mine.single[delivery.receipt] = self._begin(Operation.PROCESS, [delivery], batch=False)
        return span.current()

    def handled_together(self, deliveries: Sequence[Delivery]) -> AbstractContextManager[object]:
        """Return a context in which the span of a batch handler's messages is the current one."""
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
        """Add an event to this thread's open spans: the database has rolled their transaction back."""
        if self.recorded:
            for span in self._mine().all():
                span.event(RETRY_EVENT, attributes)

    def failed_together(self, error: BaseException) -> None:
        """Record that a batch was rolled back and that its messages are now processed singly."""
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
        if not self.recorded:
            return
        mine = self._mine()
        together, receipts = mine.together, mine.receipts
        for settlement in settlements:
            outcome, receipt = settlement.outcome, settlement.delivery.receipt
            span = mine.single.pop(receipt, None)
            if span is None:
                if receipt in receipts and outcome is Outcome.PROCESSED:
                    continue  # its span is the batch's
                if outcome is Outcome.IN_FLIGHT and settlement.error is None:
                    continue  # it was never begun
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
        """Whether spans are wanted: tracing is on, and the poll's own span is recorded."""
        return self._tracing.enabled and self._recorded.get()

    def _mine(self) -> "_BatchSpans":
        mine = self._spans.get()
        if mine is None:
            mine = _BatchSpans()
            self._spans.set(mine)
        return mine


class _BatchSpans:
    def __init__(self) -> None:
        self.single: dict[str, Span] = {}  # by the receipt of the delivery
        self.together: Span | None = None  # for what a batch handler was given
        self.receipts: set[str] = set()  # the deliveries in ``together``

    def all(self) -> list[Span]:
        return [*self.single.values(), *([] if self.together is None else [self.together])]


def _failure(settlement: Settlement) -> str | None:
    """Return the value of ``error.type``; None if the message has not failed."""
    if settlement.outcome in _NO_FAILURES:
        return None
    if settlement.error is not None:
        return error_type(settlement.error)
    return settlement.outcome.value if settlement.outcome in _REFUSED else None


_NO_FAILURES = (Outcome.PROCESSED, Outcome.DUPLICATE)
_REFUSED = (Outcome.MISMATCH, Outcome.EXPIRED)

NO_SPANS = ConsumerSpans(NO_TRACING, "", "")
