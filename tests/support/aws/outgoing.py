"""Messages on their way out, for every kind of destination that AWS has."""

from typing import Any

from txbox.relay import OutboxMessage, PartlySent, Publisher, Refused

QUEUE = "https://sqs.eu-central-1.amazonaws.com/123456789012/purchases"
FIFO_QUEUE = f"{QUEUE}.fifo"
TOPIC = "arn:aws:sns:eu-central-1:123456789012:purchases"
FIFO_TOPIC = f"{TOPIC}.fifo"
BUS = "arn:aws:events:eu-central-1:123456789012:event-bus/purchases"

DESTINATIONS = {"sqs": QUEUE, "sns": TOPIC, "eventbridge": BUS}
OTHERS = {"sqs": f"{QUEUE}-2", "sns": f"{TOPIC}-2", "eventbridge": f"{BUS}-2"}


def outgoing(destination: str, *ids: str, **fields: Any) -> list[OutboxMessage]:
    """Messages with these ids."""
    return [OutboxMessage(id_, destination, **{"body": b"{}", **fields}) for id_ in ids]


def numbered(destination: str, count: int, **fields: Any) -> list[OutboxMessage]:
    """So many messages."""
    return outgoing(destination, *(f"m{number}" for number in range(count)), **fields)


def sent(publisher: Publisher, messages: list[OutboxMessage]) -> tuple[list[Refused], PartlySent | None]:
    """Send; return what was refused, and the outage if there was one."""
    try:
        return list(publisher.send(messages)), None
    except PartlySent as partly:
        return list(partly.refused), partly
