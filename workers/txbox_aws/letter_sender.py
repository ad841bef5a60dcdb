"""Sends dead letters back to their SQS queues; boto3 is needed by the first one only, not by letters of a relay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from txbox import DeadLetter

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


@contextmanager
def letter_sender(queue_url: str | None = None) -> Iterator[Callable[[DeadLetter], None]]:
    """Give a function that sends letters to their own queues, or to this one; it makes one client for each queue."""
    clients: dict[str, SQSClient] = {}

    def send(letter: DeadLetter) -> None:
        from txbox_aws.sqs import redrive_to_queue, sqs_client

        target = queue_url or letter.source
        if target not in clients:
            clients[target] = sqs_client(target)
        redrive_to_queue(letter, client=clients[target], queue_url=target)

    try:
        yield send
    finally:
        for client in clients.values():
            client.close()
