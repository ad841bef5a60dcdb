"""Functions as publishers keep the promises of the ports, and so does a publisher of another package.

Those of AWS do so in ``txbox_aws/publishers``.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.directory_broker import MAX_BYTES, DirectoryPublisher, DirectorySource
from txbox import BrokerError, Message
from txbox.relay import AsyncFunctionPublisher, FunctionPublisher, OutboxMessage
from txbox_testing.conformance.async_publisher import AsyncPublisherConformance
from txbox_testing.conformance.publisher import PublisherConformance
from txbox_testing.conformance.source import in_order


class Called:
    """What functions were called with."""

    name, gone, hanging = "own:here", "own:gone", "own:hanging"
    takes_events_only, keeps_order = False, True

    def __init__(self, publishes: type[FunctionPublisher] | type[AsyncFunctionPublisher]) -> None:
        self._publishes = publishes
        self._arrived: list[Message] = []

    def publisher(self) -> FunctionPublisher | AsyncFunctionPublisher:
        return self._publishes(self._call if self._publishes is FunctionPublisher else self._await)

    def unacceptable(self) -> OutboxMessage:
        return OutboxMessage("wrong", self.name, b"wrong")

    def arrived(self) -> Sequence[Message]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def _call(self, message: OutboxMessage) -> None:
        if message.destination == self.gone:
            raise BrokerError("away")
        if message.id == "wrong":
            raise ValueError("not this one")
        self._arrived.append(Message(message.id, message.body, message.headers))

    async def _await(self, message: OutboxMessage) -> None:
        if message.destination == self.hanging:
            await asyncio.get_running_loop().create_future()
        self._call(message)


class Directory:
    """One of the broker that these tests make up."""

    takes_events_only, keeps_order = False, True

    def __init__(self, folder: Path) -> None:
        self.name, self.gone = f"dir:{folder}", f"dir:{folder}/gone"
        self._folder = folder

    def publisher(self) -> DirectoryPublisher:
        return DirectoryPublisher()

    def unacceptable(self) -> OutboxMessage:
        return OutboxMessage("large", self.name, b"x" * (MAX_BYTES + 1))

    def arrived(self) -> Sequence[Message]:
        return [one.message for one in in_order(DirectorySource(self.name), len(list(self._folder.iterdir())))]


class TestFunctionPublisher(PublisherConformance):
    @pytest.fixture
    def destination(self) -> Called:
        return Called(FunctionPublisher)


class TestAsyncFunctionPublisher(AsyncPublisherConformance):
    @pytest.fixture
    def destination(self) -> Called:
        return Called(AsyncFunctionPublisher)


class TestDirectoryPublisher(PublisherConformance):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Directory:
        return Directory(tmp_path)
