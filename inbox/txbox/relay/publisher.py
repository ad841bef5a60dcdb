"""The interface between the relay and a broker, and publishers that call a function."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Protocol, TypeGuard

from txbox.dead_letters.failures import describe
from txbox.errors import BrokerError, InvalidConfiguration
from txbox.leases.handlers import is_coroutine_function, refuse_unfinished
from txbox.text import text_of

AT_ONCE = 8
"""Messages of one call that an ``AsyncFunctionPublisher`` sends concurrently."""


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """A message on its way out.

    Attributes:
        id: made when it was published; the same in every send. It must travel with the message.
        destination: where it is sent.
        body: as it was published, byte for byte.
        key: messages with the same key stay in order; None: no order.
        headers: what travels beside the body.
        attempts: how often it was refused before.
        published_at: when it was published, by the database's clock; None if that cannot be read.
    """

    id: str
    destination: str
    body: bytes
    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    attempts: int = 0
    published_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that could not be sent, through its own fault or by chance.

    Attributes:
        message: the message.
        error: why, in words.
        final: whether trying again cannot help; it becomes a dead letter at once.
        counted: whether this counts as an attempt. False if the broker itself failed: the message is sent again after a
            pause, as often as it takes.
    """

    message: OutboxMessage
    error: str
    final: bool = False
    counted: bool = True


class PartlySent(BrokerError):
    """The broker was lost while messages were being sent: it has confirmed some and not others.

    Attributes:
        unsent: messages to send again; none of them is to blame.
        refused: messages that were refused before the loss.
    """

    def __init__(self, message: str, unsent: Sequence[OutboxMessage], refused: Sequence[Refused] = ()) -> None:
        super().__init__(message)
        self.unsent = tuple(unsent)
        self.refused = tuple(refused)


class Publisher(Protocol):
    """Sends messages of one kind of destination. Several threads may call it at once."""

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        """Send messages, and return when the broker has confirmed them.

        No two of them have the same key and destination, so they may be sent in any order, and at once.

        Return within the relay's ``publish_timeout_seconds``, or the messages are sent again. A slow publisher gets
        fewer messages the next time; one that hangs occupies a sender of the relay until it returns.

        Args:
            messages: at least one, all for destinations of this kind.

        Returns:
            The messages that were not sent. All others count as sent and are forgotten.

        Raises:
            BrokerError: the broker cannot be reached, or nothing can be sent to this destination for now. No message is
                to blame: all are sent again later under the same ids, including any that did arrive. Raise
                ``PartlySent`` to name the messages to send again.
            Exception: any other error counts as a refusal of every message.
        """


class AsyncPublisher(Protocol):
    """Sends messages of one kind of destination like ``Publisher``, but is awaited: hundreds of calls may be under way.

    All calls run in the relay's one event loop, which starts and ends with the relay. If a publisher is an async
    context manager, the loop enters it before its first call and leaves it after its last: open and close clients
    there. If entering raises, or takes longer than ``publish_timeout_seconds``, the relay tries again; until then it
    sends nothing to the publisher's destinations. Leaving may take five seconds and is then cancelled. A call that
    blocks the loop delays the calls of every async publisher, and nothing else in the relay.
    """

    async def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        """Send messages, and return when the broker has confirmed them; see ``Publisher.send``.

        The relay cancels the call after ``publish_timeout_seconds``, or when the time for a stop is over. Then none of
        its messages counts as sent; they are sent again later under the same ids.

        Args:
            messages: at least one, all for one destination, and no two with the same key.

        Returns:
            The messages that were not sent. All others count as sent and are forgotten.

        Raises:
            BrokerError: the broker cannot be reached; as for ``Publisher``, including ``PartlySent``.
            Exception: any other error counts as a refusal of every message.
        """


class FunctionPublisher:
    """Calls your function for each message, one after the other."""

    def __init__(self, function: Callable[[OutboxMessage], object]) -> None:
        """Take a function that sends one message, and returns when it has arrived. Several threads call it at once.

        If it raises ``BrokerError``, nothing can be sent for now; any other error refuses the message.

        Raises:
            InvalidConfiguration: it is a coroutine function, which would never be awaited.
        """
        if is_coroutine_function(function):
            raise InvalidConfiguration("FunctionPublisher.function is a coroutine function: use AsyncFunctionPublisher")
        self._function = function

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        """Call the function for each message; see ``Publisher``."""
        refused: list[Refused] = []
        for number, message in enumerate(messages):
            try:
                _refuse_unfinished(self._function(message))
            except BrokerError as error:
                raise PartlySent(text_of(error), unsent=messages[number:], refused=refused) from error
            except Exception as error:  # noqa: BLE001 - it is the host's code
                refused.append(Refused(message, describe(error)))
        return refused


class AsyncFunctionPublisher:
    """Calls your coroutine function for each message, several at once."""

    def __init__(self, function: Callable[[OutboxMessage], Awaitable[object]], *, at_once: int = AT_ONCE) -> None:
        """Take a function that sends one message and ends when it has arrived.

        If it raises ``BrokerError``, nothing can be sent for now; any other error refuses the message.

        Args:
            function: is awaited for each message.
            at_once: how many messages of one call it sends concurrently. No two of them have the same key.

        Raises:
            InvalidConfiguration: ``at_once`` is below 1.
        """
        if at_once < 1:
            raise InvalidConfiguration(f"AsyncFunctionPublisher.at_once must be at least 1, not {at_once!r}")
        self._function = function
        self._at_once = at_once

    async def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        """Call the function for each message; see ``AsyncPublisher``."""
        refused: list[Refused] = []
        unsent = dict(enumerate(messages))  # what has neither arrived nor been refused
        outages: list[BrokerError] = []
        left = iter(enumerate(messages))
        own_task = asyncio.current_task()

        async def send_in_turn() -> None:
            for number, message in left:
                if outages:
                    return
                try:
                    _refuse_unfinished(await self._function(message))
                except BrokerError as error:
                    outages.append(error)
                    return
                except GeneratorExit:  # its loop has already ended, and nothing more may begin
                    raise
                except BaseException as error:  # it is the host's code; SystemExit would end the loop
                    # A function may await something cancelled; the group would ignore that error.
                    if isinstance(error, asyncio.CancelledError) and own_task is not None and own_task.cancelling():
                        raise
                    refused.append(Refused(message, describe(error)))
                del unsent[number]

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._at_once, len(messages))):
                group.create_task(send_in_turn())
        if unsent:
            outage = outages[0] if outages else BrokerError("the calls were cancelled")
            raise PartlySent(text_of(outage), unsent=list(unsent.values()), refused=refused) from outage
        return refused


def _refuse_unfinished(result: object) -> None:
    refuse_unfinished(result, of="the publisher's function", instead="return when the message has arrived")


def is_async(publisher: Publisher | AsyncPublisher) -> TypeGuard[AsyncPublisher]:
    """Return whether a publisher's calls are awaited: its ``send`` is a coroutine function."""
    return inspect.iscoroutinefunction(publisher.send)
