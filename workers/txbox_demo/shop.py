"""The first service of the chain: takes orders, and owes billing a message for each."""

from datetime import date, datetime

from sqlalchemy import BigInteger, Column, Connection, Date, Engine, Integer, MetaData, Table, Text, insert, select
from sqlalchemy.orm import Session

from txbox.outbox.outbox import Outbox
from txbox_demo.purchases import Purchase

__all__ = ["create_tables", "place_order", "purchase_order_table", "read_orders"]

metadata = MetaData()
purchase_order_table = Table(
    "purchase_order",
    metadata,
    Column("order_id", Text, primary_key=True),
    Column("customer_id", Text, nullable=False),
    Column("ordered_on", Date, nullable=False),
    Column("cds", Integer, nullable=False),
    Column("cents", BigInteger, nullable=False),
)

_INSERT = insert(purchase_order_table)


def place_order(session: Session, outbox: Outbox, queue_url: str, purchase: Purchase) -> None:
    """Write an order down and publish it, both in the session's transaction.

    Args:
        session: whose transaction it is.
        outbox: where it is published.
        queue_url: to whom.
        purchase: what was ordered; its id is the message's, and messages of one customer keep their order.
    """
    session.execute(
        _INSERT,
        {
            "order_id": purchase.event_id,
            "customer_id": purchase.customer_id,
            "ordered_on": _day(purchase.date),
            "cds": purchase.cds,
            "cents": purchase.cents,
        },
    )
    outbox.publish(session, queue_url, purchase.as_json(), key=purchase.customer_id, message_id=purchase.event_id)


def create_tables(engine: Engine) -> None:
    """Create the service's own table."""
    metadata.create_all(engine)


def read_orders(connection: Connection) -> dict[str, Purchase]:
    """Return every order, by its id."""
    columns = purchase_order_table.c
    rows = connection.execute(
        select(columns.order_id, columns.customer_id, columns.ordered_on, columns.cds, columns.cents)
    )
    return {
        row.order_id: Purchase(row.order_id, row.customer_id, f"{row.ordered_on:%Y%m%d}", row.cds, row.cents)
        for row in rows
    }


def _day(text: str) -> date:
    return datetime.strptime(text, "%Y%m%d").date()  # noqa: DTZ007 - a day of the calendar, in no zone
