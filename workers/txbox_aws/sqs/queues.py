"""Queues themselves: make one, remove one, see how much one holds."""

from typing import TYPE_CHECKING

from txbox_aws.sqs.client import given_or_own, translated

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["create_queue", "delete_queue", "queue_backlog"]


def create_queue(name: str, *, client: "SQSClient | None" = None) -> str:
    """Create a queue, FIFO if its name says so, and return its URL; one that exists is returned as it is.

    Raises:
        BrokerError: SQS cannot be reached, or refuses.
    """
    attributes = {"FifoQueue": "true"} if name.endswith(".fifo") else {}
    with translated(name), given_or_own(client) as sqs:
        return sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]  # type: ignore[arg-type]


def delete_queue(queue_url: str, *, client: "SQSClient") -> None:
    """Delete a queue and what is in it.

    Raises:
        BrokerError: SQS cannot be reached, or refuses.
    """
    with translated(queue_url):
        client.delete_queue(QueueUrl=queue_url)


def queue_backlog(queue_url: str, *, client: "SQSClient | None" = None) -> dict[str, int]:
    """Return how many messages a queue holds, by SQS's own approximate figures.

    Raises:
        BrokerError: the queue cannot be reached.
    """
    names = {
        "waiting": "ApproximateNumberOfMessages",
        "delivered": "ApproximateNumberOfMessagesNotVisible",
        "delayed": "ApproximateNumberOfMessagesDelayed",
    }
    with translated(queue_url), given_or_own(client, queue_url) as sqs:
        answer = sqs.get_queue_attributes(QueueUrl=queue_url, AttributeNames=list(names.values()))  # type: ignore[arg-type]
    return {what: int(answer["Attributes"][name]) for what, name in names.items()}  # type: ignore[index]
