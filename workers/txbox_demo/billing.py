"""The second service of the chain: adds each purchase to its customer's account, and has the customer notified."""

import json

from sqlalchemy import BigInteger, Column, Connection, Engine, Integer, MetaData, Table, Text, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from txbox import Message
from txbox.outbox.outbox import Outbox
from txbox_demo.purchases import Account

__all__ = ["SUBSCRIBER", "Billing", "account_table", "create_tables", "read_accounts"]

SUBSCRIBER = "billing"

metadata = MetaData()
account_table = Table(
    "account",
    metadata,
    Column("customer_id", Text, primary_key=True),
    Column("purchases", Integer, nullable=False),
    Column("cds", Integer, nullable=False),
    Column("cents", BigInteger, nullable=False),
)


def _upsert() -> object:
    purchase = insert(account_table)
    return purchase.on_conflict_do_update(
        index_elements=[account_table.c.customer_id],
        set_={name: account_table.c[name] + purchase.excluded[name] for name in ("purchases", "cds", "cents")},
    )


_UPSERT = _upsert()


class Billing:
    """The handler. It knows nothing of duplicates.

    What it publishes gets an id of its own in each run: were it ever run twice for a purchase, or its message sent
    although its transaction was rolled back, then the customer would be notified twice, and the demo would see it.
    """

    def __init__(self, outbox: Outbox, notifications_url: str) -> None:
        """Take the outbox, and the queue of those who notify customers; an empty one: nobody is told."""
        self._outbox = outbox
        self._notifications_url = notifications_url

    def __call__(self, session: Session, message: Message) -> None:
        """Add one purchase to its customer's account and publish that it was billed, in the worker's transaction."""
        purchase = message.json()
        customer_id = purchase["customer_id"]
        session.execute(
            _UPSERT,  # type: ignore[call-overload]
            {"customer_id": customer_id, "purchases": 1, "cds": purchase["cds"], "cents": purchase["cents"]},
        )
        if self._notifications_url:
            billed = {"purchase_id": message.id, "customer_id": customer_id, "cents": purchase["cents"]}
            self._outbox.publish(session, self._notifications_url, json.dumps(billed), key=customer_id)


def create_tables(engine: Engine) -> None:
    """Create the service's own table."""
    metadata.create_all(engine)


def read_accounts(connection: Connection) -> dict[str, Account]:
    """Return every customer's account as the database has it."""
    columns = account_table.c
    rows = connection.execute(select(columns.customer_id, columns.purchases, columns.cds, columns.cents))
    return {row.customer_id: Account(row.purchases, row.cds, row.cents) for row in rows}
