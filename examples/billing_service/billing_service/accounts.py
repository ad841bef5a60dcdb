"""Accounts: the table, the handler that adds purchases to it, and what an account holds."""

from sqlalchemy import BigInteger, Column, Engine, Integer, MetaData, Table, Text, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from txbox import Message

metadata = MetaData()
account = Table(
    "account",
    metadata,
    Column("account_id", Text, primary_key=True),
    Column("purchases", Integer, nullable=False),
    Column("cents", BigInteger, nullable=False),
)


def add_purchase(session: Session, message: Message) -> None:
    """Add a purchase to its account: the handler. The worker commits."""
    purchase = message.json()
    new = insert(account).values(account_id=purchase["account_id"], purchases=1, cents=purchase["cents"])
    session.execute(
        new.on_conflict_do_update(
            index_elements=[account.c.account_id],
            set_={"purchases": account.c.purchases + 1, "cents": account.c.cents + new.excluded.cents},
        )
    )


def find_account(engine: Engine, account_id: str) -> dict[str, object] | None:
    """Return an account; None if nothing was ever bought for it."""
    with engine.connect() as connection:
        row = connection.execute(select(account).where(account.c.account_id == account_id)).mappings().one_or_none()
    return None if row is None else dict(row)
