"""Settlers ack and hand back what has an outcome: at once, or from threads of their own.

The ack comes after the commit, so a crash in between leads to a redelivery, which the inbox rejects. For the same
reason an ack may be late: if a queued ack is lost, the message comes again and does nothing.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from txbox import BrokerError, Outcome
from txbox.instrumentation import Settled
from txbox.text import log_failure, text_of
from txbox_workers.delivery import Settlement
from txbox_workers.polling.context import PollingContext

SETTLERS = 8
"""How many threads settle, and so call the broker, at a time."""

CALL_DELIVERIES = 10
"""How many deliveries are worth a call: as many as SQS takes."""

GATHER_SECONDS = 0.05
"""How long fewer acks than that wait for others."""


class Settler:
    """Settles in the thread that calls it."""

    def __init__(self, context: PollingContext) -> None:
        self._context = context

    def settle(self, settlements: Sequence[Settlement]) -> None:
        """Ack and hand back, according to the outcomes."""
        if not settlements:
            return
        context = self._context
        context.heartbeat.forget(settlement.delivery for settlement in settlements)
        to_ack = [settlement.delivery for settlement in settlements if settlement.outcome.acked]
        to_hand_back = [settlement for settlement in settlements if not settlement.outcome.acked]
        acked: set[str] = set()
        # A failure loses nothing: what was not acked or handed back comes again when its visibility ends.
        if to_ack:
            with source_errors_logged(context.subscriber_id, "ack a batch"), context.spans.settling("ack", to_ack):
                acked = set(context.source.ack(to_ack))
        if to_hand_back:
            handed_back = [settlement.delivery for settlement in to_hand_back]
            with (
                source_errors_logged(context.subscriber_id, "hand back a batch"),
                context.spans.settling("hand_back", handed_back),
            ):
                context.source.hand_back(to_hand_back)
        context.activity.settled(settlements)
        details = context.wants_details()
        for settlement in settlements:
            delivery = settlement.delivery
            if not details and settlement.outcome in _QUIET and delivery.receipt in acked:
                continue
            context.emit(
                Settled,
                message_id=delivery.message.id,
                delivery_id=delivery.receipt,
                outcome=settlement.outcome,
                acked=delivery.receipt in acked,
                attempts=delivery.receive_count,
                error=settlement.error,
                counted=settlement.counted,
            )


class QueuedSettler(Settler):
    """Settles in threads of its own, several calls at a time, and gathers acks into tens.

    One thread at a time hands back, in order: a source may deliver again in that order.
    """

    def __init__(self, context: PollingContext, on_settled: Callable[[int], object]) -> None:
        """``on_settled`` is called with the number of deliveries after they were settled."""
        super().__init__(context)
        self._on_settled = on_settled
        self._changed = threading.Condition()
        self._acks: deque[_Queued] = deque()
        self._returns: deque[_Queued] = deque()
        self._gathered_at = 0.0  # when the waiting acks stop waiting for more
        self._is_handing_back = False
        self._is_ending = False

    def settle(self, settlements: Sequence[Settlement]) -> None:
        """Queue deliveries to be acked or handed back."""
        if not settlements:
            return
        recorded = self._context.spans.recorded
        with self._changed:
            if not self._acks:
                self._gathered_at = time.monotonic() + GATHER_SECONDS
            for settlement in settlements:
                (self._acks if settlement.outcome.acked else self._returns).append((settlement, recorded))
            self._changed.notify(bool(self._returns) + -(-len(self._acks) // CALL_DELIVERIES))

    def end(self) -> None:
        """Let the threads settle what is queued and return. Nothing more may be queued."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    def run(self) -> None:
        """Settle until the end. This is the body of a thread."""
        while queued := self._next():
            self._context.spans.resume(any(recorded for _, recorded in queued))
            try:
                super().settle([settlement for settlement, _ in queued])
            finally:
                self._on_settled(len(queued))
                if not queued[0][0].outcome.acked:
                    self._end_handing_back()

    def _next(self) -> "list[_Queued]":
        """Wait for what is worth a call and return it; return nothing at the end."""
        with self._changed:
            while True:
                if self._returns and not self._is_handing_back:
                    self._is_handing_back = True
                    returns = list(self._returns)
                    self._returns.clear()
                    return returns
                now = time.monotonic()
                if self._acks and (len(self._acks) >= CALL_DELIVERIES or now >= self._gathered_at or self._is_ending):
                    return self._share_of_acks()
                if self._is_ending and not self._returns:
                    return []
                self._changed.wait(self._gathered_at - now if self._acks else None)

    def _share_of_acks(self) -> "list[_Queued]":
        """Take a fair share of the waiting acks for one thread, in tens."""
        calls = -(-len(self._acks) // (SETTLERS * CALL_DELIVERIES))
        return [self._acks.popleft() for _ in range(min(calls * CALL_DELIVERIES, len(self._acks)))]

    def _end_handing_back(self) -> None:
        with self._changed:
            self._is_handing_back = False
            self._changed.notify_all()


@contextmanager
def source_errors_logged(subscriber_id: str, what: str) -> Iterator[None]:
    """Log what a source raises, and suppress it."""
    try:
        yield
    except BrokerError as error:
        _log.warning("%s could not %s: %s", subscriber_id, what, text_of(error))
    except BaseException:  # noqa: BLE001 - a source is third-party code and must not end the thread
        log_failure("%s could not %s: an unexpected error", subscriber_id, what)


_Queued = tuple[Settlement, bool]
"""A settlement, and whether the spans of its batch are recorded."""

_QUIET = (Outcome.PROCESSED, Outcome.DUPLICATE)
"""What the log mentions only at DEBUG, once the broker has confirmed the ack."""

_log = logging.getLogger("txbox.worker")
