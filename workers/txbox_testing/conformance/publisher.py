"""What every publisher must do: the suites of ``txbox.relay.Publisher`` and ``AsyncPublisher``."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import pytest

from txbox import BrokerError, Message
from txbox.relay import AsyncPublisher, OutboxMessage, PartlySent, Publisher, Refused
from txbox.relay.publisher import is_async

__all__ = [
    "AsyncDestinationUnderTest",
    "AsyncPublisherConformance",
    "DestinationUnderTest",
    "PublisherConformance",
    "SendAnswer",
]

Result = TypeVar("Result")

LIMIT_SECONDS = 30.0
"""Whatever does not have to wait has ended by then."""

WRAPPER = {"Type": "Notification", "MessageId": "other", "TopicArn": "arn:aws:sns:x:1:x", "Message": "inner"}
EVENTS = [
    json.dumps(WRAPPER).encode(),
    b"{}",
    b'{"a": 1.10,\n"a": "twice"}',
    '{"Zoë": "<detail>"}'.encode(),
    b'{"large": "' + b"x" * 200_000 + b'"}',
]
OTHER_BODIES = [b"", b"\x00\xff", "\ufffe \x0b".encode(), "Zoë 😀\r\n\t".encode(), b"plain", b'{"a":' * 20_000]
HEADERS = {"tenant": "Zoë, <b>&amp;</b>", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
PUBLISHED_AT = datetime(2026, 1, 1, tzinfo=UTC)


class DestinationUnderTest(Protocol):
    """A test's own destination.

    Attributes:
        name: the destination, as messages name it.
        gone: another destination of the same publisher, which does not exist or does not answer.
        takes_events_only: whether bodies must be JSON objects.
        keeps_order: whether messages of a key that are sent one after the other arrive in that order.
    """

    name: str
    gone: str
    takes_events_only: bool
    keeps_order: bool

    def publisher(self) -> Publisher | AsyncPublisher:
        """Return a publisher that the test may keep. The fixture closes it if that is needed."""

    def unacceptable(self) -> OutboxMessage | None:
        """Return a message that is refused here through its own fault, or None if all are taken."""

    def arrived(self, count: int) -> Sequence[Message]:
        """Return what has arrived since the last call, in order. Wait until there are ``count``, if that takes time."""


class SendAnswer(NamedTuple):
    """The result of one call."""

    refused: Sequence[Refused]
    unsent: Sequence[OutboxMessage] = ()
    error: BrokerError | None = None


class PublisherConformance:
    """Subclass it, and override ``destination``."""

    is_async = False

    @pytest.fixture
    def destination(self) -> DestinationUnderTest:
        """Return a test's own destination."""
        raise NotImplementedError

    def send(self, publisher: Publisher | AsyncPublisher, *calls: Sequence[OutboxMessage]) -> list[SendAnswer]:
        """Make calls one after the other."""
        assert not is_async(publisher)
        return [_answer(publisher, messages) for messages in calls]  # type: ignore[arg-type]

    def send_at_once(self, publisher: Publisher | AsyncPublisher, *calls: Sequence[OutboxMessage]) -> list[SendAnswer]:
        """Make calls at the same time."""
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(lambda messages: self.send(publisher, messages)[0], calls))

    def test_it_is_what_it_says(self, destination: DestinationUnderTest) -> None:
        assert is_async(destination.publisher()) == self.is_async

    def test_every_body_and_header_arrives_as_it_was_sent_under_its_own_id(
        self, destination: DestinationUnderTest
    ) -> None:
        bodies = EVENTS if destination.takes_events_only else EVENTS + OTHER_BODIES
        messages = [
            OutboxMessage(f"m{number}", destination.name, body, f"k{number}", HEADERS, number, PUBLISHED_AT)
            for number, body in enumerate(bodies)
        ]
        assert self.send(destination.publisher(), messages) == [SendAnswer([])]
        arrived = {message.id: message for message in destination.arrived(len(messages))}
        assert {id_: message.body for id_, message in arrived.items()} == {one.id: one.body for one in messages}
        assert all(HEADERS.items() <= message.headers.items() for message in arrived.values())

    def test_one_call_may_have_many_messages(self, destination: DestinationUnderTest) -> None:
        assert self.send(destination.publisher(), numbered(destination.name, 33)) == [SendAnswer([])]
        assert ids(destination.arrived(33)) == ids(numbered(destination.name, 33))

    def test_what_is_sent_again_has_the_id_that_it_had(self, destination: DestinationUnderTest) -> None:
        (message,) = numbered(destination.name, 1)
        answers = self.send(destination.publisher(), [message], [replace(message, attempts=1)])
        assert answers == [SendAnswer([])] * 2
        assert {one.id for one in destination.arrived(1)} == {message.id}

    def test_messages_of_a_key_arrive_in_the_order_of_the_calls(self, destination: DestinationUnderTest) -> None:
        if not destination.keeps_order:
            pytest.skip("the broker keeps no order")
        messages = [replace(one, key="ann") for one in numbered(destination.name, 5)]
        assert self.send(destination.publisher(), *([one] for one in messages)) == [SendAnswer([])] * 5
        assert [one.id for one in destination.arrived(5)] == [one.id for one in messages]

    def test_a_message_that_is_refused_is_named_and_no_other(self, destination: DestinationUnderTest) -> None:
        wrong = destination.unacceptable()
        if wrong is None:
            pytest.skip("it takes every message")
        first, last = numbered(destination.name, 2)
        (answer,) = self.send(destination.publisher(), [first, wrong, last])
        (refused,) = answer.refused
        assert (refused.message, answer.unsent) == (wrong, ())
        assert refused.error.strip()
        assert ids(destination.arrived(2)) == ids([first, last])

    def test_an_outage_is_no_messages_fault_and_names_what_is_to_be_sent_again(
        self, destination: DestinationUnderTest
    ) -> None:
        lost, good = numbered(destination.gone, 3), replace(numbered(destination.name, 1)[0], id="good")
        (answer,) = self.send(destination.publisher(), [lost[0], good, *lost[1:]])
        assert (answer.refused, str(answer.error).strip() != "") == ((), True)
        assert {one.id for one in lost} <= {one.id for one in answer.unsent} <= {one.id for one in [*lost, good]}
        if good not in answer.unsent:
            assert ids(destination.arrived(1)) == ["good"]

    def test_an_outage_counts_what_was_refused_before_it(self, destination: DestinationUnderTest) -> None:
        wrong = destination.unacceptable()
        if wrong is None:
            pytest.skip("it takes every message")
        (lost,) = numbered(destination.gone, 1)
        (answer,) = self.send(destination.publisher(), [wrong, lost])
        refused = [one.message for one in answer.refused]
        assert (refused, answer.unsent) in (([wrong], (lost,)), ([], (wrong, lost)))

    def test_it_sends_again_after_an_outage(self, destination: DestinationUnderTest) -> None:
        good = numbered(destination.name, 2)
        lost, sent = self.send(destination.publisher(), numbered(destination.gone, 1), good)
        assert lost.error is not None
        assert sent == SendAnswer([])
        assert ids(destination.arrived(2)) == ids(good)

    def test_several_calls_may_be_under_way_at_once(self, destination: DestinationUnderTest) -> None:
        messages = numbered(destination.name, 40)
        calls = [messages[start : start + 5] for start in range(0, 40, 5)]
        assert self.send_at_once(destination.publisher(), *calls) == [SendAnswer([])] * 8
        assert ids(destination.arrived(40)) == ids(messages)


class AsyncDestinationUnderTest(DestinationUnderTest, Protocol):
    """A test's own destination.

    Attributes:
        hanging: another destination of the same publisher, whose broker accepts messages and never answers.
    """

    hanging: str


class AsyncPublisherConformance(PublisherConformance):
    """Subclass it, and override ``destination``. A publisher that is an async context manager is entered first."""

    is_async = True

    @pytest.fixture
    def destination(self) -> AsyncDestinationUnderTest:
        """Return a test's own destination."""
        raise NotImplementedError

    def send(self, publisher: Publisher | AsyncPublisher, *calls: Sequence[OutboxMessage]) -> list[SendAnswer]:
        """Await calls one after the other."""

        async def in_turn(entered: AsyncPublisher) -> list[SendAnswer]:
            return [await _awaited(entered, messages) for messages in calls]

        return _run(publisher, in_turn)

    def send_at_once(self, publisher: Publisher | AsyncPublisher, *calls: Sequence[OutboxMessage]) -> list[SendAnswer]:
        """Await calls at the same time."""

        async def together(entered: AsyncPublisher) -> list[SendAnswer]:
            return await asyncio.gather(*(_awaited(entered, messages) for messages in calls))

        return _run(publisher, together)

    def test_a_call_that_hangs_delays_no_other_and_ends_when_it_is_cancelled(
        self, destination: AsyncDestinationUnderTest
    ) -> None:
        good, after = numbered(destination.name, 20), numbered(destination.name, 21)[20:]

        async def beside_it(entered: AsyncPublisher) -> None:
            hangs = asyncio.create_task(_awaited(entered, numbered(destination.hanging, 20)))
            assert await asyncio.wait_for(_awaited(entered, good), LIMIT_SECONDS) == SendAnswer([])
            assert not hangs.done()
            hangs.cancel()
            await asyncio.wait([hangs], timeout=LIMIT_SECONDS)
            assert hangs.cancelled(), "its messages would count as sent, or as refused"
            assert await asyncio.wait_for(_awaited(entered, after), LIMIT_SECONDS) == SendAnswer([])

        _run(destination.publisher(), beside_it)
        assert ids(destination.arrived(21)) == ids([*good, *after])

    def test_it_works_in_another_loop_after_the_first_has_ended(self, destination: AsyncDestinationUnderTest) -> None:
        publisher, (first, second) = destination.publisher(), numbered(destination.name, 2)
        assert self.send(publisher, [first]) + self.send(publisher, [second]) == [SendAnswer([])] * 2
        assert ids(destination.arrived(2)) == ids([first, second])


def numbered(destination: str, count: int) -> list[OutboxMessage]:
    """Return messages that each have a key of their own."""
    return [
        OutboxMessage(f"m-{number:02}", destination, json.dumps({"number": number}).encode(), f"key-{number}")
        for number in range(count)
    ]


def ids(messages: Sequence[Message | OutboxMessage]) -> list[str]:
    """Return the ids of messages, sorted: most brokers promise no order."""
    return sorted(message.id for message in messages)


def lost_in(error: BrokerError, messages: Sequence[OutboxMessage]) -> SendAnswer:
    """Return the result of a call that an outage ended."""
    if isinstance(error, PartlySent):
        return SendAnswer(tuple(error.refused), tuple(error.unsent), error)
    return SendAnswer((), tuple(messages), error)


def _answer(publisher: Publisher, messages: Sequence[OutboxMessage]) -> SendAnswer:
    try:
        return SendAnswer(list(publisher.send(messages) or ()))
    except BrokerError as error:
        return lost_in(error, messages)


async def _awaited(publisher: AsyncPublisher, messages: Sequence[OutboxMessage]) -> SendAnswer:
    try:
        return SendAnswer(list(await publisher.send(messages) or ()))
    except BrokerError as error:
        return lost_in(error, messages)


def _run(publisher: Publisher | AsyncPublisher, work: Callable[[AsyncPublisher], Awaitable[Result]]) -> Result:
    async def entered() -> Result:
        async with AsyncExitStack() as stack:
            if hasattr(publisher, "__aenter__"):
                await stack.enter_async_context(cast("Any", publisher))
            return await work(cast("AsyncPublisher", publisher))

    return asyncio.run(entered())
