"""The dispatcher: hands messages to publishers, each key in order, and checks their answers.

Publishers may be the host's code, so they may raise anything, return anything and take any time.

One generator decides what to call next and what an answer means, and calls nothing itself. ``dispatch`` makes its calls
in a sender's thread; ``dispatch_async`` awaits them.
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
"""Messages in the first call for a destination."""

MAX_CALL_SIZE = 100_000
"""More than any batch has."""

MAX_GROWTH = 4
"""How many times larger a call may be than the one before: one quick call is too small a sample."""

CLAIM_CHECKS = 4
"""How often the claim is checked within the time after which the server ends it."""

CANCEL_SECONDS = 5.0
"""How long a publisher's coroutine may take to end after it is cancelled."""

REFUSED = "refused"
"""The ``error.type`` of a call that has refused messages."""


@dataclass(slots=True)
class DispatchResult:
    """What became of the messages; those in neither ``sent`` nor ``refused`` were not tried or are sent again."""

    sent: set[int] = field(default_factory=set)  # positions of the messages that the broker has confirmed
    # By position: messages that were not sent, through their own fault or by chance.
    refused: dict[int, Refused] = field(default_factory=dict)
    outage: BrokerError | None = None  # why the broker cannot be reached; None if it can
    slowest_seconds: float = 0.0  # duration of a publisher's slowest call


@dataclass(slots=True, eq=False)
class PublisherCall:
    """A call of a publisher, before, during and after it is made."""

    kind: str
    rows: Sequence[Row]  # no two have the same key
    messages: Sequence[OutboxMessage]  # those of the rows
    began: float = 0.0  # by ``time.monotonic``
    reported: bool = False  # whether it was already reported as overdue
    answer: object = None
    error: BaseException | None = None
    span: Span = NO_SPAN

    def __str__(self) -> str:
        return f"{self.destination}, of {len(self.messages)} messages from {self.messages[0].id} on"

    @property
    def destination(self) -> str:
        return self.messages[0].destination

    def refusals(self) -> Sequence[Refused]:
        """Return the messages that were refused. Raise ``BrokerError`` if the broker could not be reached."""
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
        """Take the publishers by kind of destination, and how long one of their calls may take.

        ``halted`` returns whether nothing more may be sent to a destination for now.
        """
        self._tracing = tracing
        self._publishers = publishers
        self._async_kinds = {kind for kind, publisher in publishers.items() if is_async(publisher)}
        self._publish_timeout_seconds = publish_timeout_seconds
        self._halted = halted
        # Calls under way, keyed by thread number, or by the call itself for a coroutine.
        self._calls: dict[Hashable, PublisherCall] = {}
        # One per destination: one that hangs must not make the others' calls smaller.
        self._call_sizes: Recent[str, CallSize] = Recent()

    def call_began(self, thread: int) -> float | None:
        """Return when the call that a thread is making began, by ``time.monotonic``; None if it makes none."""
        call = self._calls.get(thread)
        return None if call is None else call.began

    def overdue_calls(self) -> list[PublisherCall]:
        """Return the calls that have taken too long and are still running."""
        latest = time.monotonic() - self._publish_timeout_seconds
        return [call for call in list(self._calls.values()) if call.began < latest]

    @property
    def all_async(self) -> bool | None:
        """Whether all publishers are async (True), none is (False), or some are (None)."""
        return (
            self._async_kinds == set(self._publishers) if len(self._async_kinds) in (0, len(self._publishers)) else None
        )

    def is_async(self, rows: Iterable[Row]) -> bool:
        """Return whether these messages are an async sender's: they have publishers, and all of these are async."""
        if not self._async_kinds:
            return False
        kinds: set[str] = set()
        for destination in {row.message.destination for row in rows}:
            with suppress(NotSendable):
                kinds.add(scheme(destination))
        kinds &= self._publishers.keys()
        return bool(kinds) and kinds <= self._async_kinds

    def dispatch(self, rows: Sequence[Row], *, check_claim: Callable[[], object]) -> DispatchResult:
        """Send the messages of one destination until a call cannot reach the broker or sending is halted.

        ``check_claim`` raises if the claim on the messages was lost; that error propagates.
        """
        result = DispatchResult()
        checked_at = time.monotonic()
        for call in self._calls_for(rows, result):
            # If the claim was lost, another relay has it and may already have sent what comes next.
            if time.monotonic() - checked_at > self._publish_timeout_seconds / CLAIM_CHECKS:
                check_claim()
                checked_at = time.monotonic()
            try:
                with self._made(call, threading.get_ident()):
                    call.answer = self._publisher_of(call, is_async=False).send(call.messages)
            except BaseException as error:  # noqa: BLE001 - the host's code may raise this, and end its thread with us
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
        """Send as ``dispatch`` does, by async publishers; ``result`` has what was sent even if this is cancelled.

        Args:
            rows: of one destination.
            result: gets what becomes of the messages.
            check_claim: returns once the claim is known to hold; raises if it was lost.
            wait_entered: returns once a publisher may be called; raises ``BrokerError`` if it may not.
            seconds: no call begins later than this, so that what was sent gets settled; the rest is left.
            on_stuck: is called if a coroutine keeps running after it was cancelled; this then waits for it to end.
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
        """Run a publisher's coroutine in its own task, and cancel that when its time is up."""
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
        """Yield the calls one by one. The caller makes each and sets its answer or error before asking for the next."""
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
        """Return one call per kind of destination; add messages that cannot be sent to ``failed``."""
        by_kind: dict[str, list[Row]] = {}
        for row in rows:
            try:
                kind = scheme(row.message.destination)
                if row.flaw is not None:
                    raise NotSendable(row.message.destination, row.flaw)
            except NotSendable as error:  # inserted by hand: ``publish`` would have refused it
                result.refused[row.position] = Refused(row.message, str(error), final=True)
                failed.add(row.position)
            else:
                by_kind.setdefault(kind, []).append(row)
        return [PublisherCall(kind, rows, [row.message for row in rows]) for kind, rows in by_kind.items()]

    @contextmanager
    def _made(self, call: PublisherCall, key: Hashable) -> Iterator[None]:
        """Register a call as under way and give it a span, for as long as it runs."""
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
        """Read the outcome of a call, and return the positions of the messages that were not sent."""
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
        if (call.kind in self._async_kinds) is not is_async:  # a row that was inserted by hand
            raise NotSendable(call.destination, "is not in a lane of its own; publish it by Outbox.publish")
        return publisher


class KeyOrder(Generic[T]):
    """Hands out messages in rounds of at most one per key; the rest of a key comes in later rounds.

    A broker answers for each message of a call separately, so of two messages of one key in one call, the second may
    arrive without the first. Rounds prevent that: once a message has failed, no other of its key is handed out.
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
        """Yield the rounds. Call ``stop`` between two of them to take out a key."""
        number = 0
        while messages := self._unordered + [queue[number] for queue in self._queues.values() if number < len(queue)]:
            yield messages
            self._unordered = []
            number += 1

    def stop(self, key: Hashable) -> None:
        self._queues.pop(key, None)


class CallSize:
    """How many messages a publisher's next call may have, computed from how long calls take. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        """Start small; a call should take at most ``seconds``."""
        self._seconds = seconds
        self.value = FIRST_CALL_SIZE
        self._lock = threading.Lock()

    @contextmanager
    def measured(self, count: int) -> Iterator[None]:
        """Measure a call of ``count`` messages, whether it fails or not, and adjust the size."""
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            with self._lock:
                fitting = int(count * self._seconds / took) if took > 0 else MAX_CALL_SIZE
                # A quick call with few messages must not make the next one smaller.
                if fitting < self.value or count >= self.value // MAX_GROWTH:
                    self.value = max(1, min(fitting, max(self.value, count * MAX_GROWTH), MAX_CALL_SIZE))


def _checked(answer: object, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
    """Return a publisher's answer. Raise TypeError if it is not one: any message may or may not have arrived."""
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
    """Return what identifies a message in a publisher's answer, which may hold copies of ours."""
    return message.id, message.destination
