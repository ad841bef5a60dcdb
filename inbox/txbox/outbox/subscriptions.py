"""Who gets the messages of a topic::

    Subscriptions(engine).add("sold", "billing")
    …
    outbox.publish(session, "topic:sold", body)     # is the same as to "inbox:billing", and to each other subscriber

A subscription counts for what is published after it was committed. Messages that were published before it ends stay,
and the subscriber's workers still get them.
"""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine

from txbox.errors import InvalidConfiguration, NotSendable
from txbox.messages.destinations import INBOX, TOPIC, scheme
from txbox.messages.message import MAX_SUBSCRIBER_BYTES, valid_text
from txbox.outbox.lanes import lanes_of
from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import bounded_wait, check_table, short_transaction


class SubscriptionStatements(SqlFile, file="subscriptions.sql"):
    add: str
    remove: str
    all_of_them: str


@dataclass(frozen=True, slots=True)
class Subscription:
    """A subscriber that gets the messages of a topic.

    Attributes:
        topic: the topic's name, without ``topic:``.
        subscriber_id: the subscriber's name.
        added_at: since when, by the database's clock.
    """

    topic: str
    subscriber_id: str
    added_at: datetime | None


class Subscriptions:
    """The subscriptions of all topics in one database. Each method is a transaction of its own.

    Methods raise ``SchemaMissing`` if our tables do not exist, and ``TableLocked`` if another session has locked one.
    """

    def __init__(self, engine: Engine, *, schema: str | None = None, prefix: str = "") -> None:
        """Name the database and the outbox's tables; this connects to nothing.

        Args:
            engine: the database of the outbox.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
        """
        self._engine = engine
        self._statements = SubscriptionStatements.load(schema, prefix)

    def add(self, topic: str, subscriber_id: str) -> bool:
        """Subscribe to a topic. Return False if the subscriber has done so already.

        Args:
            topic: the topic's name, with or without ``topic:``.
            subscriber_id: who gets its messages from now on.

        Raises:
            InvalidConfiguration: a name cannot be part of a destination.
        """
        named = _named(topic, subscriber_id)
        first_lane = lanes_of(f"{INBOX}{subscriber_id}")[0]
        return self._change(self._statements.add, {**named, "first_lane": first_lane})

    def remove(self, topic: str, subscriber_id: str) -> bool:
        """End a subscription; return False if there is none. Takes the arguments of ``add`` and raises its error."""
        return self._change(self._statements.remove, _named(topic, subscriber_id))

    def list(self) -> tuple[Subscription, ...]:
        """Return all subscriptions, by topic and subscriber."""
        with short_transaction(self._engine) as connection:
            check_table(connection, self._statements.tables.subscription)
            rows = connection.exec_driver_sql(self._statements.all_of_them).mappings()
            return tuple(Subscription(**with_moments(row, "added_at")) for row in rows)

    def _change(self, statement: str, values: dict[str, str | int]) -> bool:
        table = self._statements.tables.subscription
        with short_transaction(self._engine) as connection:
            check_table(connection, table)
            with bounded_wait(connection, table):
                return connection.exec_driver_sql(statement, values).rowcount > 0


def _named(topic: str, subscriber_id: str) -> dict[str, str | int]:
    name = topic.removeprefix(TOPIC)
    for what, value, destination in (("topic", name, TOPIC), ("subscriber_id", subscriber_id, INBOX)):
        valid_text(value, what, MAX_SUBSCRIBER_BYTES)
        try:
            scheme(f"{destination}{value}")
        except NotSendable as error:
            raise InvalidConfiguration(f"{what} cannot begin or end with a blank: {value!r}") from error
    return {"topic": name, "subscriber_id": subscriber_id}
