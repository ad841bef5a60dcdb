"""What every async publisher does: the suite of ``txbox.relay.AsyncPublisher``."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar, cast

import pytest

from txbox import BrokerError
from txbox.relay import AsyncPublisher, OutboxMessage, Publisher
from txbox_testing.conformance.publisher import (
    Answer,
    DestinationUnderTest,
    PublisherConformance,
    ids,
    lost_in,
    numbered,
)

__all__ = ["AsyncDestinationUnderTest", "AsyncPublisherConformance"]

Result = TypeVar("Result")

LIMIT_SECONDS = 30.0
"""What need not wait for anything has ended by then."""


class AsyncDestinationUnderTest(DestinationUnderTest, Protocol):
    """A destination of one test's own.

    Attributes:
        hanging: another one of the same publisher, whose broker takes messages and never answers.
    """

    hanging: str


class AsyncPublisherConformance(PublisherConformance):
    """Subclass it, and override ``destination``. A publisher that is an async context manager is entered first."""

    is_async = True

    @pytest.fixture
    def destination(self) -> AsyncDestinationUnderTest:
        """Return a destination of one test's own."""
        raise NotImplementedError

    def send(self, publisher: Publisher | AsyncPublisher, *calls: Sequence[OutboxMessage]) -> list[Answer]:
        """Await calls, one after the other."""

        async def in_turn(entered: AsyncPublisher) -> list[Answer]:
            return [await _answer(entered, messages) for messages in calls]

        return _run(publisher, in_turn)

    def send_at_once(self, publisher: Publisher | AsyncPublisher, *calls: Sequence[OutboxMessage]) -> list[Answer]:
        """Await calls, all at once."""

        async def together(entered: AsyncPublisher) -> list[Answer]:
            return await asyncio.gather(*(_answer(entered, messages) for messages in calls))

        return _run(publisher, together)

    def test_a_call_that_hangs_delays_no_other_and_ends_when_it_is_cancelled(
        self, destination: AsyncDestinationUnderTest
    ) -> None:
        good, after = numbered(destination.name, 20), numbered(destination.name, 21)[20:]

        async def beside_it(entered: AsyncPublisher) -> None:
            hangs = asyncio.create_task(_answer(entered, numbered(destination.hanging, 20)))
            assert await asyncio.wait_for(_answer(entered, good), LIMIT_SECONDS) == Answer([])
            assert not hangs.done()
            hangs.cancel()
            await asyncio.wait([hangs], timeout=LIMIT_SECONDS)
            assert hangs.cancelled(), "its messages would count as sent, or as refused"
            assert await asyncio.wait_for(_answer(entered, after), LIMIT_SECONDS) == Answer([])

        _run(destination.publisher(), beside_it)
        assert ids(destination.arrived()) == ids([*good, *after])

    def test_it_works_in_another_loop_after_the_first_has_ended(self, destination: AsyncDestinationUnderTest) -> None:
        publisher, (first, second) = destination.publisher(), numbered(destination.name, 2)
        assert self.send(publisher, [first]) + self.send(publisher, [second]) == [Answer([])] * 2
        assert ids(destination.arrived()) == ids([first, second])


async def _answer(publisher: AsyncPublisher, messages: Sequence[OutboxMessage]) -> Answer:
    try:
        return Answer(list(await publisher.send(messages) or ()))
    except BrokerError as error:
        return lost_in(error, messages)


def _run(publisher: Publisher | AsyncPublisher, work: Callable[[AsyncPublisher], Awaitable[Result]]) -> Result:
    async def entered() -> Result:
        async with AsyncExitStack() as stack:
            if hasattr(publisher, "__aenter__"):
                await stack.enter_async_context(cast("Any", publisher))
            return await work(cast("AsyncPublisher", publisher))

    return asyncio.run(entered())
