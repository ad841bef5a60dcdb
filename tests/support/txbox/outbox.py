"""An outbox, what tests publish in it, and what a relay has parked."""

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


def letters(engine: Engine) -> list[tuple[str, str, int]]:
    """Return subscriber, error and attempts of each dead letter, read without any code under test."""
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT subscriber_id, error, attempts FROM dead_letter ORDER BY 1, 2")
        return [tuple(row) for row in found]


def held(engine: Engine) -> int:
    """Return how many messages of the outbox are held."""
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM outbox_message WHERE held").scalar_one())
