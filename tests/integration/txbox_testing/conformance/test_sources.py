"""Every source of ours keeps the promises of the port, and so does one of another package."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.aws.queues import held
from support.directory_broker import DirectorySource, write
from txbox import Message
from txbox.relay import OutboxMessage
from txbox_aws.publishers import SqsPublisher
from txbox_aws.sqs import SqsSource
from txbox_testing.conformance.source import SourceConformance
from txbox_workers.memory_source import MemorySource

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


class Directory:
    """One of the broker that these tests make up."""

    batch_size, keeps_order = 10, False

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def source(self, visibility_seconds: int = 60) -> DirectorySource:
        return DirectorySource(f"dir:{self._folder}", visibility_seconds=visibility_seconds)

    def missing(self) -> DirectorySource:
        return DirectorySource(f"dir:{self._folder}/missing")

    def put(self, messages: Sequence[Message], key: str | None = None) -> None:
        for one in messages:
            write(f"dir:{self._folder}", one.id, one.body, {**one.headers, **({"key": key} if key else {})})

    def held(self) -> int:
        return len(list(self._folder.iterdir()))


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
