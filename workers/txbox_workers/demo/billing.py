"""The service of the demo: adds each purchase to its customer's account."""

from sqlalchemy import BigInteger, Column, Connection, Engine, Integer, MetaData, Table, Text, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from txbox import Message
from txbox_workers.demo.purchases import Account

__all__ = ["SUBSCRIBER", "account_table", "add_purchase", "read_accounts"]

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


def add_purchase(session: Session, message: Message) -> None:
    """Add one purchase to its customer's account: the handler. It knows nothing of duplicates."""
    purchase = message.json()
    session.execute(
        _UPSERT,  # type: ignore[call-overload]
        {
            "customer_id": purchase["customer_id"],
            "purchases": 1,
            "cds": purchase["cds"],
            "cents": purchase["cents"],
        },
    )


def create_tables(engine: Engine) -> None:
    """Create the service's own table."""
    metadata.create_all(engine)


def read_accounts(connection: Connection) -> dict[str, Account]:
    """Return every customer's account as the database has it."""
    columns = account_table.c
    rows = connection.execute(select(columns.customer_id, columns.purchases, columns.cds, columns.cents))
    return {row.customer_id: Account(row.purchases, row.cds, row.cents) for row in rows}
