"""A queue of the local SQS, and the limit of whoever sends to it: a bare loop of boto3's send_message_batch."""

import os
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import boto3
from relay_place import BODY

from txbox.message import HEADER_MESSAGE_ID
from txbox_local import LocalAws

__all__ = ["LocalQueue", "send_bare"]

BATCH = 10
"""What SQS takes in one call."""


class LocalQueue:
    """A queue on a local server of its own, made anew for each measurement."""

    def __init__(self, aws: LocalAws) -> None:
        """Take a server that runs."""
        self.environment = aws.environment()
        self._client = _client(self.environment)
        self.url = ""

    @contextmanager
    def fresh(self) -> Iterator[str]:
        """Make a queue, and delete it at the end; yields its URL."""
        self.url = self._client.create_queue(QueueName=f"benchmark-{uuid.uuid4().hex[:8]}")["QueueUrl"]
        yield self.url
        self._client.delete_queue(QueueUrl=self.url)

    def waiting(self) -> int:
        """How many messages the queue holds."""
        name = "ApproximateNumberOfMessages"
        return int(self._client.get_queue_attributes(QueueUrl=self.url, AttributeNames=[name])["Attributes"][name])


def send_bare(environment: dict[str, str], queue_url: str, count: int, threads: int) -> float:
    """Send messages with nothing but boto3, in a process of its own; return messages a second.

    Args:
        environment: boto3's variables.
        queue_url: where to.
        count: how many messages.
        threads: as many as the relay has.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_send_bare, environment, queue_url, count, threads).result()


def _send_bare(environment: dict[str, str], queue_url: str, count: int, threads: int) -> float:
    client = _client(environment)
    batches = [range(start, min(start + BATCH, count)) for start in range(0, count, BATCH)]
    lock, troubles = threading.Lock(), []

    def loop() -> None:
        while True:
            with lock:
                if not batches:
                    return
                batch = batches.pop()
            entries: list[Any] = [
                {
                    "Id": str(number),
                    "MessageBody": BODY,
                    "MessageAttributes": {HEADER_MESSAGE_ID: {"DataType": "String", "StringValue": str(uuid.uuid4())}},
                }
                for number in batch
            ]
            answer = client.send_message_batch(QueueUrl=queue_url, Entries=entries)
            if answer.get("Failed"):
                troubles.append(RuntimeError(f"the queue refused messages: {answer['Failed'][0]}"))
                return

    running = [threading.Thread(target=loop) for _ in range(threads)]
    begun = time.perf_counter()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if troubles:
        raise troubles[0]
    return count / (time.perf_counter() - begun)


def _client(environment: dict[str, str]) -> Any:
    os.environ.update(environment)
    return boto3.client("sqs")
