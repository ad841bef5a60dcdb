"""The dispatcher: hands messages to publishers, each key in its order, and checks what they answer.

Publishers may be the host's code, so they may raise anything, return anything, and take any time.

What is called next, and what an answer means, is decided by one generator, which calls nothing. ``dispatch`` makes its
calls in a sender's thread, ``dispatch_async`` awaits them.
"""

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from txbox.bounded_memory import Recent
from txbox.dead_letters.failures import describe
from txbox.errors import BrokerError, NotSendable
from txbox.messages.destinations import scheme
from txbox.relay.publisher import AsyncPublisher, OutboxMessage, PartlySent, Publisher, Refused, is_async
from txbox.relay.settlement import Row
from txbox.text import text_of
from txbox.tracing import NO_SPAN, NO_TRACING, Operation, Span, Tracing, error_type

T = TypeVar("T")

FIRST_CALL_SIZE = 50
"""Messages of a destination's first call."""

MAX_CALL_SIZE = 100_000
"""More than any batch has."""

MAX_GROWTH = 4
"""So many times as many as before, at most: one quick call is too small a sample."""

CLAIM_CHECKS = 4
"""Checks that the claim is still ours, within the time after which the server ends it."""

CANCEL_SECONDS = 5.0
"""How long the coroutine of a publisher may take to end after it was cancelled."""

REFUSED = "refused"
"""What ``error.type`` is of a call that has refused messages."""


@dataclass(slots=True)
class DispatchResult:
    """The result of sending messages; those in neither of the first two were not tried, or are to be sent again."""

    sent: set[int] = field(default_factory=set)  # positions of those that the broker has confirmed
    # By position, those that were not sent, through their own fault or by chance.
    refused: dict[int, Refused] = field(default_factory=dict)
    outage: BrokerError | None = None  # why the broker cannot be reached; None if it can
    slowest_seconds: float = 0.0  # how long the slowest call of a publisher took


@dataclass(slots=True, eq=False)
class PublisherCall:
    """A call of a publisher: to be made, under way, or with what has come of it."""

    kind: str
    rows: Sequence[Row]  # no two of them have one key
    messages: Sequence[OutboxMessage]  # theirs
    began: float = 0.0  # when, by ``time.monotonic``
    reported: bool = False  # whether it was found to be overdue before
    answer: object = None
    error: BaseException | None = None
    span: Span = NO_SPAN

    def __str__(self) -> str:
        return f"{self.destination}, of {len(self.messages)} messages from {self.messages[0].id} on"

    @property
    def destination(self) -> str:
        """That of the first of its messages."""
        return self.messages[0].destination

    def refusals(self) -> Sequence[Refused]:
        """Return which of its messages were refused; raises ``BrokerError`` if the broker could not be reached."""
        messages = self.messages
        try:
            if self.error is not None:
                raise self.error
            return _checked(self.answer, messages)
        except PartlySent as error:
            try:
                _checked(error.refused, [*messages, *error.unsent])
                _checked([Refused(message, "") for message in error.unsent], messages)
            except TypeError as nonsense:
                raise BrokerError(f"{text_of(error)}; and {nonsense}") from error
            raise
        except BrokerError:
            raise
        except BaseException as error:  # noqa: BLE001 - as in ``dispatch``
            return [Refused(message, describe(error)) for message in messages]


class Dispatcher:
    """Hands messages to the publishers of their kinds. Thread-safe."""

    def __init__(
        self,
        publishers: Mapping[str, Publisher | AsyncPublisher],
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
        self._async_kinds = {kind for kind, publisher in publishers.items() if is_async(publisher)}
        self._publish_timeout_seconds = publish_timeout_seconds
        self._halted = halted
        # Calls under way: of a thread by its number, of a coroutine by the call itself.
        self._calls: dict[Hashable, PublisherCall] = {}
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

    @property
    def all_async(self) -> bool | None:
        """Whether all publishers are async ones, or none is; None: some are."""
        return (
            self._async_kinds == set(self._publishers) if len(self._async_kinds) in (0, len(self._publishers)) else None
        )

    def is_async(self, rows: Iterable[Row]) -> bool:
        """Return whether an async sender is to send these messages: some have an async publisher, and none another."""
        if not self._async_kinds:
            return False
        kinds: set[str] = set()
        for destination in {row.message.destination for row in rows}:
            with suppress(NotSendable):
                kinds.add(scheme(destination))
        kinds &= self._publishers.keys()
        return bool(kinds) and kinds <= self._async_kinds

    def dispatch(self, rows: Sequence[Row], *, check_claim: Callable[[], object]) -> DispatchResult:
        """Send the messages of one destination, until one call cannot reach the broker or it is halted.

        ``check_claim`` raises if the claim on them was lost; that passes through.
        """
        result = DispatchResult()
        checked_at = time.monotonic()
        for call in self._calls_for(rows, result):
            # A claim that was lost meanwhile is another relay's: what comes next may be sent already, and more.
            if time.monotonic() - checked_at > self._publish_timeout_seconds / CLAIM_CHECKS:
                check_claim()
                checked_at = time.monotonic()
            try:
                with self._made(call, threading.get_ident()):
                    call.answer = self._publisher_of(call, is_async=False).send(call.messages)
            except BaseException as error:  # noqa: BLE001 - a publisher may be the host's code, and end its thread with us
                call.error = error
        return result

    async def dispatch_async(
        self,
        rows: Sequence[Row],
        result: DispatchResult,
        *,
        check_claim: Callable[[], Awaitable[object]],
        wait_entered: Callable[[AsyncPublisher], Awaitable[object]],
        seconds: float,
        on_stuck: Callable[[], object],
    ) -> None:
        """Send as ``dispatch``, by async publishers; what was sent is in ``result`` even if this is cancelled.

        Args:
            rows: of one destination.
            result: gets what becomes of them.
            check_claim: returns once the claim is known to stand, and raises if it was lost.
            wait_entered: returns once a publisher may be called, and raises ``BrokerError`` if it may not.
            seconds: after so many no further call is made, so that what was sent is settled; the rest is left.
            on_stuck: is called if a coroutine goes on though it was cancelled; this then waits for its end.
        """
        for call in self._calls_for(rows, result, until=time.monotonic() + seconds):
            await check_claim()
            with self._made(call, call):
                await self._await(call, wait_entered, on_stuck)

    async def _await(
        self,
        call: PublisherCall,
        wait_entered: Callable[[AsyncPublisher], Awaitable[object]],
        on_stuck: Callable[[], object],
    ) -> None:
        """Run a publisher's coroutine, in a task of its own, which is cancelled when its time has passed."""
        sending = asyncio.create_task(self._answer(call, wait_entered), name=f"a call of the publisher for {call}")
        try:
            if (await asyncio.wait([sending], timeout=self._publish_timeout_seconds))[0]:
                if sending.cancelled():
                    call.error = RuntimeError("the publisher has cancelled its own coroutine")
                else:
                    call.answer, call.error = sending.result()
                return
            call.error = BrokerError(f"its publisher has not returned for {self._publish_timeout_seconds:g} s")
            sending.cancel()
            if not (await asyncio.wait([sending], timeout=CANCEL_SECONDS))[0]:
                on_stuck()
                await asyncio.wait([sending])
        except asyncio.CancelledError:
            sending.cancel()
            raise

    async def _answer(
        self, call: PublisherCall, wait_entered: Callable[[AsyncPublisher], Awaitable[object]]
    ) -> tuple[object, BaseException | None]:
        try:
            publisher = self._publisher_of(call, is_async=True)
            await wait_entered(publisher)
            return await publisher.send(call.messages), None
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - as in ``dispatch``; and SystemExit would end the loop
            return None, error

    def _calls_for(
        self, rows: Sequence[Row], result: DispatchResult, *, until: float = math.inf
    ) -> Iterator[PublisherCall]:
        """Yield one call after the other. Before the next one, it has to be made, and its answer or its error set."""
        if not rows:
            return
        destination = rows[0].message.destination
        if (size := self._call_sizes.get(destination)) is None:
            size = self._call_sizes[destination] = CallSize(self._publish_timeout_seconds / CLAIM_CHECKS)
        order = KeyOrder((row.ordered, row) for row in rows)
        first = True
        for left in order:
            while left and result.outage is None and not self._halted(destination):
                if not first and time.monotonic() > until:
                    return
                first = False
                count = size.value
                batch, left = left[:count], left[count:]
                began = time.monotonic()
                failed: set[int] = set()
                with size.measured(len(batch)):
                    for call in self._divide(batch, result, failed):
                        yield call
                        failed |= self._conclude(call, result)
                result.slowest_seconds = max(result.slowest_seconds, time.monotonic() - began)
                for row in batch:
                    if row.position not in failed:
                        result.sent.add(row.position)
                    elif (key := row.ordered) is not None:
                        order.stop(key)
            if left or result.outage is not None:
                break

    @staticmethod
    def _divide(rows: Sequence[Row], result: DispatchResult, failed: set[int]) -> list[PublisherCall]:
        """Return a call for each kind of destination; those that cannot be sent have failed."""
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
        return [PublisherCall(kind, rows, [row.message for row in rows]) for kind, rows in by_kind.items()]

    @contextmanager
    def _made(self, call: PublisherCall, key: Hashable) -> Iterator[None]:
        """Around a call: it is known to be under way, and has a span."""
        tracing, messages = self._tracing, call.messages
        call.span = tracing.messaging(Operation.SEND, call.destination, messages) if tracing.enabled else NO_SPAN
        call.began = time.monotonic()
        self._calls[key] = call
        try:
            with call.span.current():
                yield
        except asyncio.CancelledError:
            call.span.end("cancelled")
            raise
        finally:
            del self._calls[key]

    def _conclude(self, call: PublisherCall, result: DispatchResult) -> set[int]:
        """Read what has come of a call; return the positions of the messages that were not sent."""
        refused: Sequence[Refused] = ()
        unsent: Sequence[OutboxMessage] = ()
        failure: str | None = None
        try:
            refused = call.refusals()
        except PartlySent as error:
            result.outage, refused, unsent, failure = error, error.refused, error.unsent, error_type(error)
        except BrokerError as error:
            result.outage, unsent, failure = error, call.messages, error_type(error)
        if refused:
            call.span.end(failure or REFUSED, {"txbox.refused": len(refused)})
        else:
            call.span.end(failure)
        if not refused and not unsent:
            return set()
        refusals = {name_of(refusal.message): refusal for refusal in refused}
        left = {name_of(message) for message in unsent}
        failed: set[int] = set()
        for row in call.rows:
            name = name_of(row.message)
            if name in refusals:
                result.refused[row.position] = refusals[name]
            elif name not in left:
                continue
            failed.add(row.position)
        return failed

    def _publisher_of(self, call: PublisherCall, *, is_async: bool) -> Any:
        publisher = self._publishers.get(call.kind)
        if publisher is None:
            raise BrokerError(
                f"the relay has no publisher for {call.kind!r}, which {call.destination} needs; "
                f"it has {', '.join(sorted(self._publishers)) or 'none'}",
                permanent=True,
            )
        if (call.kind in self._async_kinds) is not is_async:  # a row that was written by hand
            raise NotSendable(call.destination, "is not in a lane of its own; publish it by Outbox.publish")
        return publisher


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
    if inspect.iscoroutine(answer):
        answer.close()
        raise TypeError("a publisher returned a coroutine: write its method as async def send")
    refused: list[Refused] = list(answer or ())  # type: ignore[call-overload]
    given = {name_of(message) for message in messages} if refused else set()
    for one in refused:
        if not (isinstance(one, Refused) and isinstance(one.error, str)):
            raise TypeError(f"a publisher returned {one!r:.200}: return Refused(message, why) for each refusal")
        if name_of(one.message) not in given:
            raise TypeError(f"a publisher refused {one.message!r:.200}, which it was not given")
    return refused


def name_of(message: OutboxMessage) -> tuple[str, str]:
    """Return by what the messages in a publisher's answer are recognized: they may be copies of ours."""
    return message.id, message.destination
