"""What ours and a broker of another package promise, by the suites of the ports.

Publishers of AWS are asked in ``txbox_aws/publishers``, ledgers in ``txbox/leases``, writers in ``test_writers.py``.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Engine

from support.aws.queues import held
from support.directory_broker import MAX_BYTES, DirectoryPublisher, DirectorySource, write
from txbox import BrokerError, Message
from txbox.outbox import Outbox
from txbox.relay import AsyncFunctionPublisher, FunctionPublisher, OutboxMessage
from txbox_aws.publishers import SqsPublisher
from txbox_aws.sqs import SqsSource
from txbox_testing.conformance.publisher import AsyncPublisherConformance, PublisherConformance
from txbox_testing.conformance.source import SourceConformance, in_order
from txbox_workers.memory_source import MemorySource
from txbox_workers.postgres import PostgresSource, source

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


class MemoryQueue:
    """One in this process: its clients are one object."""

    batch_size, keeps_order = 10, False

    def __init__(self) -> None:
        self._source = MemorySource(batch_size=self.batch_size)

    def source(self, visibility_seconds: int = 60) -> MemorySource:
        return self._source

    def missing(self) -> None:
        return None

    def put(self, messages: Sequence[Message], key: str | None = None) -> None:
        for one in messages:
            self._source.send(Message(one.id, one.body, {**one.headers, **({"key": key} if key else {})}))

    def held(self) -> int:
        source = self._source
        return len(source._ready) + len(source._delayed) + len(source._taken)


class SqsQueue:
    """One of the local SQS, with a publisher of ours to fill it."""

    batch_size = 10

    def __init__(self, url: str, sqs: "SQSClient") -> None:
        self._url, self._sqs, self.keeps_order = url, sqs, url.endswith(".fifo")

    def source(self, visibility_seconds: int = 60) -> SqsSource:
        return SqsSource(self._url, client=self._sqs, wait_seconds=1, visibility_seconds=visibility_seconds)

    def missing(self) -> SqsSource:
        return SqsSource(self._url.replace("/test-", "/none-"), client=self._sqs, wait_seconds=1)

    def put(self, messages: Sequence[Message], key: str | None = None) -> None:
        with SqsPublisher(client=self._sqs, calls_at_once=1) as publisher:
            for one in messages:  # a call with two of a key would break the publisher's own contract
                headers = {**one.headers, **({"key": key} if key and not self.keeps_order else {})}
                assert list(publisher.send([OutboxMessage(one.id, self._url, one.body, key, headers)])) == []

    def held(self) -> int:
        return sum(held(self._sqs, self._url).values())


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

    def arrived(self, count: int) -> Sequence[Message]:
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
    """A queue and a destination of the broker that these tests make up."""

    batch_size, keeps_order, takes_events_only = 10, False, False

    def __init__(self, folder: Path) -> None:
        self.name, self.gone = f"dir:{folder}", f"dir:{folder}/gone"
        self._folder = folder

    def source(self, visibility_seconds: int = 60) -> DirectorySource:
        return DirectorySource(self.name, visibility_seconds=visibility_seconds)

    def missing(self) -> DirectorySource:
        return DirectorySource(self.gone)

    def put(self, messages: Sequence[Message], key: str | None = None) -> None:
        for one in messages:
            write(self.name, one.id, one.body, {**one.headers, **({"key": key} if key else {})})

    def held(self) -> int:
        return len(list(self._folder.iterdir()))

    def publisher(self) -> DirectoryPublisher:
        return DirectoryPublisher()

    def unacceptable(self) -> OutboxMessage:
        return OutboxMessage("large", self.name, b"x" * (MAX_BYTES + 1))

    def arrived(self, count: int) -> Sequence[Message]:
        return [one.message for one in in_order(self.source(), self.held())]


class OutboxQueue:
    """The messages that the outbox of a database has for one subscriber."""

    batch_size, keeps_order = 10, False

    def __init__(self, engine: Engine, *, ordered: bool) -> None:
        self._engine, self._ordered, self._outbox = engine, ordered, Outbox()

    def source(self, visibility_seconds: int = 60) -> PostgresSource:
        return PostgresSource(
            self._engine, "billing", ordered=self._ordered, batch_size=10, visibility_seconds=visibility_seconds
        )

    def missing(self) -> None:
        return None

    def put(self, messages: Sequence[Message], key: str | None = None) -> None:
        for one in messages:
            with self._engine.begin() as connection:
                self._outbox.publish(connection, "inbox:billing", one.body, key, one.headers, one.id)

    def held(self) -> int:
        with self._engine.connect() as connection:
            return int(connection.exec_driver_sql("SELECT count(*) FROM outbox_message").scalar_one())


class TestPostgresSource(SourceConformance):
    @pytest.fixture(params=[False, True], ids=["unordered", "ordered"])
    def queue(self, request: pytest.FixtureRequest, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> OutboxQueue:
        monkeypatch.setattr(source, "CLAIM_SECONDS", 0.1)
        monkeypatch.setattr(source, "RENEWAL_SECONDS", 0.1)
        monkeypatch.setattr(source, "WAIT_SECONDS", 0.2)  # a client that is not asked gives its claims to others
        return OutboxQueue(engine, ordered=request.param)


class TestMemorySource(SourceConformance):
    @pytest.fixture
    def queue(self) -> MemoryQueue:
        return MemoryQueue()


class TestSqsSource(SourceConformance):
    @pytest.fixture(params=["standard", "fifo"])
    def queue(self, request: pytest.FixtureRequest, make_queue: Callable[..., str], sqs: "SQSClient") -> SqsQueue:
        return SqsQueue(make_queue(fifo=request.param == "fifo"), sqs)


class TestDirectorySource(SourceConformance):
    @pytest.fixture
    def queue(self, tmp_path: Path) -> Directory:
        return Directory(tmp_path)


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
