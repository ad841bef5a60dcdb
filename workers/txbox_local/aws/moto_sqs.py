"""Patches moto's SQS, so that its queues can have several consumers at once.

moto answers the SQS protocol well, but its queues were written for one test thread. Measured with moto 5.2.5:

* two receivers at once may get the same message, and ``delete_message`` replaces the list of messages without
  the lock, so that one sent at that moment is lost.
* ``receive_message`` checks only once, at its start, which FIFO groups are being processed. Two receivers at
  once, or one that was already waiting, get two messages of one group; and when two messages of a group
  become visible again together, the second is delivered first.
* every send counts the whole queue and every receive copies it, so 2,000 waiting messages cost half a
  second per request.

Here one lock guards every queue, and is released only while a receiver waits. A receive stops at the last message
that it takes, and a dictionary finds a receipt handle.

The rules of FIFO delivery are those of the SQS developer guide ("FIFO queue delivery logic"): while a message
of a group is in flight, nothing else of that group is delivered.
"""

import secrets
import time
from collections.abc import Sequence
from copy import copy
from threading import Condition, RLock
from typing import Any

from moto.sqs import models
from moto.sqs.exceptions import InvalidParameterValue, ReceiptHandleIsInvalid
from moto.sqs.models import Message, Queue, SQSBackend

LOCK = RLock()
"""Guards every queue and everything that a request changes. A receiver releases it while it waits."""

DEDUPLICATION_INTERVAL_MS = 5 * 60 * 1000
MAXIMUM_VISIBILITY_MS = 12 * 60 * 60 * 1000
RECEIPT_HANDLE_BYTES = 48
COUNTS = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesDelayed",
    "ApproximateNumberOfMessagesNotVisible",
)


def patch_sqs() -> None:
    """Make every queue that moto creates in this process a ``LocalQueue``."""
    models.Queue = LocalQueue  # type: ignore[misc] # the class that SQSBackend.create_queue looks up
    models.sqs_backends.backend = LocalSqsBackend


def _now_ms() -> float:
    return time.time() * 1000


class LocalQueue(Queue):
    """A queue whose operations are atomic. Their cost depends on the messages they touch, not on the queue's length."""

    # The counts need a walk over all messages, and moto evaluates every attribute at each send. So only
    # LocalSqsBackend.get_queue_attributes adds them, when they are asked for.
    BASE_ATTRIBUTES = [name for name in Queue.BASE_ATTRIBUTES if name not in COUNTS]  # noqa: RUF012 # moto's name

    def __init__(self, name: str, region: str, account_id: str, **kwargs: Any) -> None:
        self._receipts: dict[str, tuple[Message, float]] = {}
        self._recently_sent: dict[tuple[str | None, str], float] = {}
        super().__init__(name, region, account_id, **kwargs)
        self.changed = self._messages_lock = Condition(LOCK)

    def add_message(self, message: Message) -> None:
        """Append `message`, unless a FIFO queue has seen its deduplication id within five minutes."""
        with self.changed:
            if self.fifo_queue and message.deduplication_id:
                if self._seen(message.group_id, message.deduplication_id):
                    return
                if not self.lambda_event_source_mappings:
                    self._messages.append(message)
                    self.changed.notify_all()
                    return
            super().add_message(message)

    def _seen(self, group_id: str | None, deduplication_id: str) -> bool:
        now = _now_ms()
        while self._recently_sent:
            oldest = next(iter(self._recently_sent))
            if self._recently_sent[oldest] > now - DEDUPLICATION_INTERVAL_MS:
                break
            del self._recently_sent[oldest]
        per_group = getattr(self, "deduplication_scope", None) == "messageGroup"
        key = (group_id if per_group else None, deduplication_id)
        if key in self._recently_sent:
            return True
        self._recently_sent[key] = now
        return False

    def take(self, count: int, visibility_timeout_seconds: int, attribute_names: list[str]) -> list[Message]:
        """Return up to `count` deliverable messages in order, each now in flight: copies, as they were received."""
        now = _now_ms()
        # Only what is still invisible counts as in flight. This is decided for all messages before the walk, with one
        # reading of the clock, so that two messages that expire together keep their order.
        self._pending_messages = {message for message in self._pending_messages if message.visible_at >= now}
        blocked = {message.group_id for message in self._pending_messages} if self.fifo_queue else set()
        taken: list[Message] = []
        exhausted: list[Message] = []
        expired: list[Message] = []
        retained_since = now - int(self.message_retention_period) * 1000  # type: ignore[attr-defined] # set by name
        for message in self._messages:
            if message.visible_at >= now or message.delayed_until > now:
                if self.fifo_queue:
                    blocked.add(message.group_id)
            elif self.fifo_queue and message.group_id in blocked:
                continue
            elif (message.sent_timestamp or 0) <= retained_since:
                expired.append(message)
            elif self._is_exhausted(message):
                exhausted.append(message)
            else:
                taken.append(self._deliver(message, now, visibility_timeout_seconds, attribute_names))
                if len(taken) == count:
                    break
        for message in expired:
            self._messages.remove(message)
        for message in exhausted:
            self._messages.remove(message)
            if self.dead_letter_queue is not None:
                self.dead_letter_queue.add_message(message)
        return taken

    def _is_exhausted(self, message: Message) -> bool:
        return bool(
            self.dead_letter_queue is not None
            and self.redrive_policy
            and message.approximate_receive_count >= self.redrive_policy["maxReceiveCount"]
        )

    def _deliver(
        self, message: Message, now: float, visibility_timeout_seconds: int, attribute_names: list[str]
    ) -> Message:
        message.approximate_first_receive_timestamp = message.approximate_first_receive_timestamp or int(now)
        message.approximate_receive_count += 1
        if visibility_timeout_seconds:
            message.visible_at = now + visibility_timeout_seconds * 1000
        if message.receipt_handle is not None:
            message._old_receipt_handles.append(message.receipt_handle)  # noqa: SLF001 # moto keeps them there
        message.receipt_handle = secrets.token_urlsafe(RECEIPT_HANDLE_BYTES)
        self._receipts[message.receipt_handle] = (message, now)
        self._pending_messages.add(message)
        delivered = copy(message)
        models._filter_message_attributes(delivered, attribute_names)  # noqa: SLF001 # AWS's prefix rules live there
        return delivered

    def seconds_until_available(self) -> float:
        """Return the seconds until the next message that is in flight or delayed may be received."""
        now = _now_ms()
        later = [max(message.visible_at, message.delayed_until) for message in self._messages]
        return max(min((due for due in later if due >= now), default=now + 1000) - now + 1, 1) / 1000

    def delete_message(self, receipt_handle: str) -> None:
        """Delete the message received with `receipt_handle`, or with an earlier one. Deleting twice is no error."""
        with self.changed:
            if receipt_handle in self.deleted_messages:
                return
            message = self.received(receipt_handle)[0]
            try:
                self._messages.remove(message)
            except ValueError:  # purged, or moved to the dead-letter queue
                raise ReceiptHandleIsInvalid from None
            self._pending_messages.discard(message)
            for handle in message.all_receipt_handles:
                if handle is not None:
                    self.deleted_messages.add(handle)
                    self._receipts.pop(handle, None)
            self.changed.notify_all()  # the next message of its group may be delivered

    def received(self, receipt_handle: str) -> tuple[Message, float]:
        """Return the message received with `receipt_handle`, and when that was, in Unix milliseconds."""
        try:
            return self._receipts[receipt_handle]
        except KeyError:
            raise ReceiptHandleIsInvalid from None

    def counts(self) -> dict[str, int]:
        """Return the three approximate counts of this queue, by attribute name."""
        now = _now_ms()
        delayed = sum(message.delayed_until > now for message in self._messages)
        in_flight = sum(message.visible_at >= now for message in self._messages)
        waiting = sum(message.visible_at < now and message.delayed_until <= now for message in self._messages)
        return dict(zip(COUNTS, (waiting, delayed, in_flight), strict=True))


class LocalSqsBackend(SQSBackend):
    """SQS of one region: moto's, with atomic operations where several consumers share them."""

    __module__ = SQSBackend.__module__  # moto finds a service's URLs beside the module of its backend

    def receive_message(
        self,
        queue_name: str,
        count: int,
        wait_seconds_timeout: int,
        visibility_timeout: int,
        message_attribute_names: list[str] | None = None,
    ) -> list[Message]:
        """Take up to `count` messages. Wait up to `wait_seconds_timeout` seconds for the first."""
        deadline = time.monotonic() + wait_seconds_timeout
        while True:
            queue = self.get_queue(queue_name)  # again after each wait: it may have been deleted
            if not isinstance(queue, LocalQueue):
                raise TypeError(f"queue {queue_name} was created before patch_sqs()")
            with queue.changed:
                taken = queue.take(count, int(visibility_timeout), message_attribute_names or [])
                remaining = deadline - time.monotonic()
                if taken or remaining <= 0:
                    return taken
                queue.changed.wait(min(remaining, queue.seconds_until_available()))

    def change_message_visibility(self, queue_name: str, receipt_handle: str, visibility_timeout: int) -> None:
        """Make a received message visible `visibility_timeout` seconds from now."""
        queue = self.get_queue(queue_name)
        if not isinstance(queue, LocalQueue):
            raise TypeError(f"queue {queue_name} was created before patch_sqs()")
        with queue.changed:
            message, received_at = queue.received(receipt_handle)
            now = _now_ms()
            if now + int(visibility_timeout) * 1000 - received_at > MAXIMUM_VISIBILITY_MS:
                raise InvalidParameterValue(
                    f"Value {visibility_timeout} for parameter VisibilityTimeout is invalid. Reason: Total "
                    "VisibilityTimeout for the message is beyond the limit [43200 seconds]"
                )
            message.visible_at = now + int(visibility_timeout) * 1000 if int(visibility_timeout) else 0.0
            if not message.visible_at:
                queue.pending_messages.discard(message)
            queue.changed.notify_all()

    def get_queue_attributes(self, queue_name: str, attribute_names: Sequence[str]) -> dict[str, Any]:
        """Return the attributes asked for. The approximate counts are taken now."""
        queue = self.get_queue(queue_name)
        plain = [name for name in attribute_names if name not in COUNTS]
        attributes: dict[str, Any] = super().get_queue_attributes(queue_name, plain)
        if isinstance(queue, LocalQueue):
            with queue.changed:
                counts = queue.counts()
            attributes |= {name: counts[name] for name in COUNTS if "All" in attribute_names or name in attribute_names}
        return attributes
