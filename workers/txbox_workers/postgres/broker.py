"""Postgres as a broker that commands and the dashboard find by its scheme; see ``txbox_workers.brokers``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Unpack

from sqlalchemy.exc import SQLAlchemyError

from txbox import BrokerError, DeadLetter, InvalidConfiguration, Outbox
from txbox.dead_letters.dead_letters import republish_in
from txbox.messages.destinations import INBOX
from txbox.messages.message import valid_subscriber_id
from txbox.outbox.status import read_backlog
from txbox.postgres.transactions import short_transaction
from txbox.text import text_of
from txbox_workers.brokers import DatabasePlace
from txbox_workers.options import WorkerOptions
from txbox_workers.postgres.source import VISIBILITY_SECONDS
from txbox_workers.postgres.worker import PostgresWorker

if TYPE_CHECKING:
    from txbox.relay import Publisher


class PostgresBroker:
    """The destinations ``inbox:SUBSCRIBER``."""

    def queue(self, name: str, place: DatabasePlace) -> "PostgresQueue":
        valid_subscriber_id(name.removeprefix(INBOX), "the name behind inbox:")
        return PostgresQueue(name, place)

    def publishers(self) -> "Mapping[str, Publisher]":
        """Return none: no relay sends to these destinations."""
        return {}

    def worker(self, queue: str, *, visibility_seconds: int | None, **options: Unpack[WorkerOptions]) -> PostgresWorker:
        subscriber_id = queue.removeprefix(INBOX)
        inbox = options.get("inbox")
        if inbox is not None and inbox.subscriber_id != subscriber_id:
            raise InvalidConfiguration(
                f"{queue} is for the subscriber {subscriber_id} alone, and the inbox is that of {inbox.subscriber_id}: "
                f"take {INBOX}{inbox.subscriber_id}, or the subscriber {subscriber_id}"
            )
        return PostgresWorker(visibility_seconds=visibility_seconds or VISIBILITY_SECONDS, **options)


class PostgresQueue:
    """What waits for the workers of one subscriber."""

    def __init__(self, name: str, place: DatabasePlace) -> None:
        self._name, self._place = name, place

    def backlog(self) -> Mapping[str, int]:
        """Return how many messages wait and are delayed; beyond 100,000, about how many."""
        place = self._place
        try:
            found = read_backlog(place.engine, self._name, schema=place.schema, prefix=place.prefix)
        except SQLAlchemyError as error:
            raise BrokerError(f"{self._name}: {text_of(error)}") from error
        if found is None:
            raise BrokerError(f"{self._name} was not counted in time")
        return found

    def send_back(self, letter: DeadLetter) -> None:
        """Publish a letter's message again, in a transaction of its own.

        ``LetterOperations`` and ``DeadLetters.republish`` do it in the transaction that marks the letter.

        Raises:
            InvalidConfiguration: it came from another broker.
            NotSendable: its key or headers cannot be published.
        """
        outbox = Outbox(schema=self._place.schema, prefix=self._place.prefix)
        try:
            with short_transaction(self._place.engine) as connection:
                republish_in(connection, letter, outbox, self._name)
        except SQLAlchemyError as error:
            raise BrokerError(f"{self._name}: {text_of(error)}") from error

    def close(self) -> None:
        """Do nothing: the engine is not ours."""
