"""The last service of the chain: notifies customers of what was billed."""

from dataclasses import dataclass

from sqlalchemy import BigInteger, Column, Connection, Engine, Identity, MetaData, Table, Text, insert, select
from sqlalchemy.orm import Session

from txbox import Message

__all__ = ["SUBSCRIBER", "Notification", "create_tables", "notification_table", "notify", "read_notifications"]

SUBSCRIBER = "notification"

metadata = MetaData()
# Nothing in this table keeps a purchase from being there twice: that is the inbox's part.
notification_table = Table(
    "notification",
    metadata,
    Column("notification_id", BigInteger, Identity(always=True), primary_key=True),
    Column("purchase_id", Text, nullable=False),
    Column("customer_id", Text, nullable=False),
    Column("cents", BigInteger, nullable=False),
)

_INSERT = insert(notification_table)


@dataclass(frozen=True, slots=True)
class Notification:
    """That a customer was told of a purchase."""

    purchase_id: str
    customer_id: str
    cents: int


def notify(session: Session, message: Message) -> None:
    """Note one notification: the handler. It knows nothing of duplicates."""
    billed = message.json()
    session.execute(_INSERT, {name: billed[name] for name in ("purchase_id", "customer_id", "cents")})


def create_tables(engine: Engine) -> None:
    """Create the service's own table."""
    metadata.create_all(engine)


def read_notifications(connection: Connection) -> list[Notification]:
    """Return every notification, those too that should not be there."""
    columns = notification_table.c
    rows = connection.execute(select(columns.purchase_id, columns.customer_id, columns.cents))
    return [Notification(row.purchase_id, row.customer_id, row.cents) for row in rows]
