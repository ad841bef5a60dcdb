"""The heartbeat: extend the visibility of deliveries while their handlers run."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from txbox.backoff import run_until_return
from txbox.text import text_of
from txbox_workers.delivery import Delivery, Source

__all__ = ["VisibilityHeartbeat"]


@dataclass(slots=True)
class _Watched:
    delivery: Delivery
    due: float


class VisibilityHeartbeat:
    """Extends the visibility of every watched delivery, from one thread, well before it ends.

    A delivery is extended after half of its visibility has passed. So a failed call does not lose it, unless failing
    takes the other half. Time is measured by the monotonic clock.
    """

    def __init__(self, source: Source, on_failure: Callable[[Delivery, str], None]) -> None:
        """Prepare; ``start`` starts the thread.

        Args:
            source: where the deliveries come from.
            on_failure: called with a delivery that could not be extended, and why.
        """
        self._source = source
        self._on_failure = on_failure
        self._watched: dict[str, _Watched] = {}
        self._changed = threading.Condition()
        self._wakes_at = math.inf
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless this source's deliveries never expire."""
        if self._source.visibility_seconds is None:
            return
        if self._thread is not None and self._thread.is_alive():
            return  # left over from a start that failed halfway
        self._stopping = False
        self._thread = threading.Thread(
            target=run_until_return,
            args=(self._run,),
            kwargs={"name": "the heartbeat", "wait": self._stopped_within},
            name="txbox-heartbeat",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait for it."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
            self._thread = None

    def watch(self, deliveries: Iterable[Delivery], received_at: float) -> None:
        """Begin to extend deliveries.

        Args:
            deliveries: which ones.
            received_at: when they arrived, by ``time.monotonic``.
        """
        seconds = self._source.visibility_seconds
        if seconds is None:
            return
        due = received_at + seconds / 2
        with self._changed:
            for delivery in deliveries:
                self._watched[delivery.receipt] = _Watched(delivery, due)
            if due < self._wakes_at:  # rare: the thread sleeps until an earlier batch is due, settled or not
                self._changed.notify()

    def forget(self, deliveries: Iterable[Delivery]) -> None:
        """Stop extending deliveries. A call in progress may still extend them once."""
        with self._changed:
            if self._watched:
                for delivery in deliveries:
                    self._watched.pop(delivery.receipt, None)

    def _run(self) -> None:
        while True:
            due = self._wait_for_due()
            if due is None:
                return
            self._extend(due)

    def _stopped_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping, seconds)

    def _wait_for_due(self) -> list[Delivery] | None:
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                due = [watched.delivery for watched in self._watched.values() if watched.due <= now]
                if due:
                    return due
                self._wakes_at = min((watched.due for watched in self._watched.values()), default=math.inf)
                self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))
        return None

    def _extend(self, deliveries: list[Delivery]) -> None:
        seconds = self._source.visibility_seconds or 0.0
        asked_at = time.monotonic()
        refused: Mapping[str, str] = {}
        try:
            refused = self._source.extend_visibility(deliveries, seconds)
        except Exception as error:  # noqa: BLE001 - a heartbeat that ends silently loses every delivery it watches
            # Half of the visibility is left: enough for a few more tries.
            next_due = time.monotonic() + min(_RETRY_SECONDS, seconds / 10)
            failures = [(delivery, text_of(error)) for delivery in deliveries]
        else:
            next_due = asked_at + seconds / 2
            failures = [(delivery, refused[delivery.receipt]) for delivery in deliveries if delivery.receipt in refused]
        with self._changed:
            # A delivery that was settled meanwhile is no longer watched, and its refusal does not matter.
            failures = [(delivery, why) for delivery, why in failures if delivery.receipt in self._watched]
            for receipt in refused:
                self._watched.pop(receipt, None)
            for delivery in deliveries:
                if watched := self._watched.get(delivery.receipt):
                    watched.due = next_due
        for delivery, why in failures:
            self._on_failure(delivery, why)


_RETRY_SECONDS = 1.0
_JOIN_SECONDS = 10.0
