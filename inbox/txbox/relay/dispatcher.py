"""The dispatcher: hands messages to publishers, each key in its order, and checks what they answer.

Publishers may be the host's code, so they may raise anything, return anything, and take any time.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from txbox.bounded_memory import Recent
from txbox.dead_letters.failures import describe
from txbox.error_logging import text_of
from txbox.errors import BrokerError, NotSendable
from txbox.relay.publisher import OutboxMessage, PartlySent, Publisher, Refused
from txbox.relay.settlement import Row
from txbox.tracing import NO_SPAN, NO_TRACING, Operation, Tracing, error_type
from txbox.wire.destinations import scheme

CLAIM_CHECKS = 4
"""Checks that the claim is still ours, within the time after which the server ends it."""

FIRST_CALL_SIZE = 50
"""Messages of a destination's first call."""

MAX_CALL_SIZE = 100_000
"""More than any batch has."""

MAX_GROWTH = 4
"""So many times as many as before, at most: one quick call is too small a sample."""

REFUSED = "refused"
"""What ``error.type`` is of a call that has refused messages."""

T = TypeVar("T")


@dataclass(slots=True)
class DispatchResult:
    """The result of sending messages; those in neither of the first two were not tried, or are to be sent again."""

    sent: set[int] = field(default_factory=set)  # positions of those that the broker has confirmed
    # By position, those that were not sent, through their own fault or by chance.
    refused: dict[int, Refused] = field(default_factory=dict)
    outage: BrokerError | None = None  # why the broker cannot be reached; None if it can
    slowest_seconds: float = 0.0  # how long the slowest call of a publisher took


@dataclass(slots=True)
class PublisherCall:
    """A call of a publisher that has not returned."""

    destination: str  # of the first of its messages
    messages: int  # how many they are
    began: float  # when, by ``time.monotonic``
    reported: bool = False  # whether it was found to be overdue before


class Dispatcher:
    """Hands messages to the publishers of their kinds. Thread-safe."""

    def __init__(
        self,
        publishers: Mapping[str, Publisher],
        publish_timeout_seconds: float,
        *,
        halted: Callable[[str], bool],
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """Take the publishers by the kind of destination, and how long one call of them may take.

        ``halted`` returns whether nothing more is to be sent to a destination for now. ``tracing`` makes a span for
        each call.
        """
        self._tracing = tracing
        self._publishers = publishers
        self._publish_timeout_seconds = publish_timeout_seconds
        self._halted = halted
        self._calls: dict[int, PublisherCall] = {}
        # One for each destination: one that hangs must not make the calls of the others small.
        self._call_sizes: Recent[str, CallSize] = Recent()

    def call_began(self, thread: int) -> float | None:
        """Return when the call began that a thread makes now, by ``time.monotonic``; None if it makes none."""
        call = self._calls.get(thread)
        return None if call is None else call.began

    def overdue_calls(self) -> list[PublisherCall]:
        """Return the calls that have taken too long, and have not returned."""
        latest = time.monotonic() - self._publish_timeout_seconds
        return [call for call in list(self._calls.values()) if call.began < latest]

    def dispatch(self, rows: Sequence[Row], *, check_claim: Callable[[], object]) -> DispatchResult:
        """Send the messages of one destination, until one call cannot reach the broker or it is halted.

        ``check_claim`` raises if the claim on them was lost; that passes through.
        """
        result = DispatchResult()
        if not rows:
            return result
        destination = rows[0].message.destination
        if (size := self._call_sizes.get(destination)) is None:
            size = self._call_sizes[destination] = CallSize(self._publish_timeout_seconds / CLAIM_CHECKS)
        order = KeyOrder((row.ordered, row) for row in rows)
        checked_at = time.monotonic()
        for left in order:
            while left and result.outage is None and not self._halted(destination):
                # A claim that was lost meanwhile is another relay's: what comes next may be sent already, and more.
                if time.monotonic() - checked_at > self._publish_timeout_seconds / CLAIM_CHECKS:
                    check_claim()
                    checked_at = time.monotonic()
                count = size.value
                batch, left = left[:count], left[count:]
                began = time.monotonic()
                with size.measured(len(batch)):
                    failed = self._send(batch, result)
                result.slowest_seconds = max(result.slowest_seconds, time.monotonic() - began)
                for row in batch:
                    if row.position not in failed:
                        result.sent.add(row.position)
                    elif (key := row.ordered) is not None:
                        order.stop(key)
            if left or result.outage is not None:
                break
        return result

    def _send(self, rows: Sequence[Row], result: DispatchResult) -> set[int]:
        """Send messages of which no two have one key; return the positions of those that were not sent."""
        failed: set[int] = set()
        by_kind: dict[str, list[Row]] = {}
        for row in rows:
            try:
                kind = scheme(row.message.destination)
                if row.flaw is not None:
                    raise NotSendable(row.message.destination, row.flaw)
            except NotSendable as error:  # published by hand: ``publish`` would have refused it
                result.refused[row.position] = Refused(row.message, str(error), final=True)
                failed.add(row.position)
            else:
                by_kind.setdefault(kind, []).append(row)
        for kind, of_kind in by_kind.items():
            failed |= self._send_kind(kind, of_kind, result)
        return failed

    def _send_kind(self, kind: str, rows: Sequence[Row], result: DispatchResult) -> set[int]:
        messages = [row.message for row in rows]
        refused: Sequence[Refused] = ()
        unsent: Sequence[OutboxMessage] = ()
        tracing, failure = self._tracing, None
        span = tracing.messaging(Operation.SEND, messages[0].destination, messages) if tracing.enabled else NO_SPAN
        try:
            with span.current(), self._tracked(messages):
                refused = self._publish(kind, messages)
        except PartlySent as error:
            result.outage, refused, unsent, failure = error, error.refused, error.unsent, error_type(error)
        except BrokerError as error:
            result.outage, unsent, failure = error, messages, error_type(error)
        if refused:
            span.end(failure or REFUSED, {"txbox.refused": len(refused)})
        else:
            span.end(failure)
        if not refused and not unsent:
            return set()
        refusals = {_name(refusal.message): refusal for refusal in refused}
        left = {_name(message) for message in unsent}
        failed: set[int] = set()
        for row in rows:
            name = _name(row.message)
            if name in refusals:
                result.refused[row.position] = refusals[name]
            elif name not in left:
                continue
            failed.add(row.position)
        return failed

    @contextmanager
    def _tracked(self, messages: Sequence[OutboxMessage]) -> Iterator[None]:
        thread = threading.get_ident()
        self._calls[thread] = PublisherCall(messages[0].destination, len(messages), time.monotonic())
        try:
            yield
        finally:
            del self._calls[thread]

    def _publish(self, kind: str, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        publisher = self._publishers.get(kind)
        if publisher is None:
            raise BrokerError(
                f"the relay has no publisher for {kind!r}, which {messages[0].destination} needs; "
                f"it has {', '.join(sorted(self._publishers)) or 'none'}",
                permanent=True,
            )
        try:
            return _checked(publisher.send(messages), messages)
        except PartlySent as error:
            try:
                _checked(error.refused, [*messages, *error.unsent])
                _checked([Refused(message, "") for message in error.unsent], messages)
            except TypeError as nonsense:
                raise BrokerError(f"{text_of(error)}; and {nonsense}") from error
            raise
        except BrokerError:
            raise
        except BaseException as error:  # noqa: BLE001 - a publisher may be the host's code, and end its thread with us
            return [Refused(message, describe(error)) for message in messages]


class KeyOrder(Generic[T]):
    """Hands messages out in rounds: at most one of each key in a round, the rest of a key after its first.

    A broker answers for each message of a call by itself, so of two messages of one key in one call, the second may
    arrive without the first. In rounds it cannot: once a message has failed, no other of its key is handed out.
    """

    def __init__(self, messages: Iterable[tuple[Hashable | None, T]]) -> None:
        self._unordered: list[T] = []
        self._queues: dict[Hashable, list[T]] = {}
        for key, message in messages:
            if key is None:
                self._unordered.append(message)
            else:
                self._queues.setdefault(key, []).append(message)

    def __iter__(self) -> Iterator[list[T]]:
        """Yield the rounds. Between two of them, ``stop`` takes keys out."""
        number = 0
        while messages := self._unordered + [queue[number] for queue in self._queues.values() if number < len(queue)]:
            yield messages
            self._unordered = []
            number += 1

    def stop(self, key: Hashable) -> None:
        """Hand out no more messages of a key."""
        self._queues.pop(key, None)


class CallSize:
    """How many messages the next call of a publisher may have, computed from how long calls take. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        """Begin small; a call should take ``seconds`` at most."""
        self._seconds = seconds
        self._value = FIRST_CALL_SIZE
        self._lock = threading.Lock()

    @property
    def value(self) -> int:
        """How many messages the next call may have."""
        return self._value

    @contextmanager
    def measured(self, count: int) -> Iterator[None]:
        """Around a call of so many messages: learn from how long it takes, whether it fails or not."""
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            with self._lock:
                fitting = int(count * self._seconds / took) if took > 0 else MAX_CALL_SIZE
                # A quick call with few messages must not make the next one smaller.
                if fitting < self._value or count >= self._value // MAX_GROWTH:
                    self._value = max(1, min(fitting, max(self._value, count * MAX_GROWTH), MAX_CALL_SIZE))


def _checked(answer: object, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
    """Return what a publisher has answered, or raise TypeError: then each of the messages may have arrived, or not."""
    refused: list[Refused] = list(answer or ())  # type: ignore[call-overload]
    given = {_name(message) for message in messages} if refused else set()
    for one in refused:
        if not (isinstance(one, Refused) and isinstance(one.error, str)):
            raise TypeError(f"a publisher returned {one!r:.200}: return Refused(message, why) for each refusal")
        if _name(one.message) not in given:
            raise TypeError(f"a publisher refused {one.message!r:.200}, which it was not given")
    return refused


def _name(message: OutboxMessage) -> tuple[str, str]:
    """Return by what the messages in a publisher's answer are recognized: they may be copies of ours."""
    return message.id, message.destination
