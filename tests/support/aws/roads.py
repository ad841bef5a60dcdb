"""Roads from a publisher to a worker, over the local AWS."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from txbox import Message
from txbox_aws.envelopes import open_envelope

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


@dataclass
class Road:
    """A destination, and the queue in which what is sent there arrives.

    Attributes:
        name: such as "sns fifo raw".
        kind: of the destination, as a relay calls it.
        destination: where to send.
        queue: where to receive.
    """

    name: str
    kind: str
    destination: str
    queue: str
    sqs: "SQSClient"

    def arrived(self) -> list[Message]:
        """Receive all that has arrived, as a worker reads it, and delete it."""
        messages = []
        while received := self.sqs.receive_message(
            QueueUrl=self.queue,
            MaxNumberOfMessages=10,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=["All"],
        ).get("Messages"):
            for record in received:
                delivery = open_envelope(record, self.queue)
                assert delivery.problem is None, delivery.problem
                messages.append(delivery.message)
                self.sqs.delete_message(QueueUrl=self.queue, ReceiptHandle=record["ReceiptHandle"])
        return messages
