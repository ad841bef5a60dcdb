"""An outbox, and what tests publish in it: numbered messages for one destination of their own."""

from sqlalchemy import Engine

from txbox import Outbox, Outgoing

OWN = "own:somewhere"
OUTBOX = Outbox()


def publish(engine: Engine, *messages: Outgoing) -> list[str]:
    """Publish messages in one transaction, and return their ids."""
    with engine.begin() as connection:
        return OUTBOX.publish_many(connection, messages)


def numbered(count: int, *, key: str | None = None, first: int = 0, to: str = OWN) -> list[Outgoing]:
    """Return messages whose bodies are numbers."""
    return [Outgoing(to, str(number), key=key) for number in range(first, first + count)]
