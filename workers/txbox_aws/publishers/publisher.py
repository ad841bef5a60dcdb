"""The base class of the publishers: send many messages in few calls, several calls at once."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

from txbox import BrokerError, InvalidConfiguration, TxboxError
from txbox.bounded_memory import Recent
from txbox.dead_letters.failures import describe
from txbox.messages.destinations import region
from txbox.relay import OutboxMessage, PartlySent, Refused
from txbox.text import text_of
from txbox_aws.clients import PUBLISHER, AwsUse, RegionalClients, code_of, translation
from txbox_aws.publishers.calls import Entry, PublishCall, PublishResult, calls, refusal
from txbox_aws.publishers.faults import CALL_ERRORS, Blame, fault_of, is_final

CALLS_AT_ONCE = 8


class _Lost(NamedTuple):
    """When and why a destination could not be reached."""

    at: float
    error: BrokerError


class AwsPublisher(ABC):
    """Sends messages to destinations of one AWS service. Several threads may use it at once.

    Messages are grouped by destination and divided into calls of at most ten. Up to ``calls_at_once`` calls of one
    ``send`` are in progress at a time, which is safe because no two of its messages have the same key. The sending
    thread makes one of them; the others are made by threads that all sends share. Calls that hang there make a ``send``
    slower but never stop it.

    Each entry of each answer is checked:

    - only what is confirmed counts as sent;
    - a message that the service refuses is refused, and finally so if only the message itself can cause that;
    - a call that is refused because of one entry is made again entry by entry, to refuse only the faulty one;
    - after an outage (throttled, 5xx, no answer, a connection lost), and when a destination refuses whatever it is sent
      (it does not exist, access is denied), no message is to blame. Calls to that destination that wait for their turn
      are not made, in any thread. The next ``send`` tries it with one call before it makes the others, as it does with
      a new destination: so a destination that does not answer does not delay those that do.

    Destinations name their regions. Credentials and endpoints are boto3's own settings.
    """

    _use: ClassVar[AwsUse[BrokerError]]
    _max_bytes: ClassVar[int]

    def __init__(
        self,
        *,
        client: Any = None,
        calls_at_once: int = CALLS_AT_ONCE,
        connect_timeout_seconds: float = PUBLISHER.connect_seconds,
        read_timeout_seconds: float = PUBLISHER.read_seconds,
    ) -> None:
        """Prepare the publisher; do not connect yet.

        Args:
            client: a client of boto3 to use for everything; None makes one for each region that is needed.
            calls_at_once: how many calls of one ``send`` may be in progress. All sends share one thread fewer than
                that, started when needed.
            connect_timeout_seconds: how long a call waits for a connection.
            read_timeout_seconds: how long it waits for an answer.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """
        for name, value in (
            ("calls_at_once", calls_at_once),
            ("connect_timeout_seconds", connect_timeout_seconds),
            ("read_timeout_seconds", read_timeout_seconds),
        ):
            if not value > 0:
                raise InvalidConfiguration(f"{type(self).__name__}.{name} must be more than 0, not {value!r}")
        use = replace(
            self._use,
            connections=calls_at_once,
            connect_seconds=connect_timeout_seconds,
            read_seconds=read_timeout_seconds,
        )
        self._clients = RegionalClients(use, client)
        self._calls_at_once = calls_at_once
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()
        self._lost: Recent[str, _Lost] = Recent()
        self._answering: Recent[str, bool] = Recent()

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        """Send messages, and return when the service has answered for all of them; see ``txbox.relay.Publisher``.

        Args:
            messages: at most one per key.

        Returns:
            Those that were refused.

        Raises:
            PartlySent: some were not sent, and no message is to blame; the error names them.
        """
        result = PublishResult()
        began = time.monotonic()
        at_once: list[PublishCall] = []
        after_a_first: list[PublishCall] = []
        tried: set[str] = set()
        for call in calls(self._entries(messages, result), self._max_bytes):
            (after_a_first if call.destination in tried else at_once).append(call)
            if call.destination not in self._answering:
                tried.add(call.destination)
        for group in (at_once, after_a_first):
            for made in self._all(group, began):
                result.add(made)
        if result.error is not None:
            partly = PartlySent(text_of(result.error), result.unsent, result.refused)
            partly.permanent = result.error.permanent
            raise partly from result.error
        return result.refused

    def close(self) -> None:
        """Finish what is in progress, then end the threads and close the connections."""
        with self._pool_lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self._clients.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _entry(self, message: OutboxMessage) -> Entry:
        """Return a message as an entry of a call."""

    @abstractmethod
    def _call(self, client: Any, call: PublishCall) -> PublishResult:
        """Make a call, and read its answer."""

    def _threads(self) -> ThreadPoolExecutor:
        with self._pool_lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    max(self._calls_at_once - 1, 1), thread_name_prefix=f"txbox-{self._use.service}"
                )
            return self._pool

    def _all(self, group: Sequence[PublishCall], began: float) -> list[PublishResult]:
        """Make calls: one after the other in this thread, and others beside it in free threads."""
        left, made = deque(enumerate(group)), dict[int, PublishResult]()

        def work() -> None:
            for number, call in _taken(left):
                made[number] = self._run(call, began)

        helpers: list[Future[None]] = []
        try:
            helpers.extend(self._threads().submit(work) for _ in range(min(len(group), self._calls_at_once) - 1))
        except RuntimeError as error:  # the interpreter is exiting and takes no more work
            ended = BrokerError(f"nothing is sent any more: {error}")
            made |= {number: PublishResult(unsent=call.messages, error=ended) for number, call in _taken(left)}
        work()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        return [made[number] for number in sorted(made)]

    def _entries(self, messages: Iterable[OutboxMessage], result: PublishResult) -> list[Entry]:
        entries = []
        for message in messages:
            try:
                entries.append(self._entry(message))
            except (TxboxError, ValueError) as error:
                # ``publish`` would have refused it; another program has put it into the table.
                result.refused.append(Refused(message, describe(error), final=True))
        return entries

    def _run(self, call: PublishCall, began: float) -> PublishResult:
        """Make a call, unless its destination was lost after the call was requested."""
        lost = self._lost.get(call.destination)
        if lost is not None and lost.at >= began:
            return PublishResult(unsent=call.messages, error=lost.error)
        try:
            result = self._made(call)
        except Exception as error:  # noqa: BLE001 - what the other calls have sent must not be lost with it
            return PublishResult(refused=[Refused(message, describe(error)) for message in call.messages])
        if result.error is not None:
            self._answering.pop(call.destination, None)
            self._lost[call.destination] = _Lost(time.monotonic(), result.error)
        else:
            self._lost.pop(call.destination, None)
            if call.destination not in self._answering:
                self._answering[call.destination] = True
        return result

    def _made(self, call: PublishCall) -> PublishResult:
        try:
            return self._call(self._clients.of(region(call.destination)), call)
        except CALL_ERRORS as error:
            if fault_of(error) is not Blame.ENTRY:
                unreached = translation(self._use, error, call.destination)
                unreached.__cause__ = error
                return PublishResult(unsent=call.messages, error=unreached)
            if len(call.entries) == 1:
                final = is_final(code_of(error), sender_fault=None)
                return PublishResult(refused=[refusal(call.entries[0], f"refused the message: {error}", final=final)])
        result = PublishResult()
        for single in call.one_by_one():
            if result.error is None:
                result.add(self._made(single))
            else:
                result.unsent += single.messages
        return result


def _taken(calls: deque[tuple[int, PublishCall]]) -> Iterator[tuple[int, PublishCall]]:
    """Take the remaining calls one after the other, while other threads do the same."""
    while calls:
        try:
            yield calls.popleft()
        except IndexError:  # another thread was faster
            return
