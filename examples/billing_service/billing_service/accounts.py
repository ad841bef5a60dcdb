"""Accounts: the table, the handler that adds purchases to it, and what an account holds."""

from pydantic import BaseModel
from sqlalchemy import BigInteger, Column, Integer, MetaData, Table, Text, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

metadata = MetaData()
account = Table(
    "account",
    metadata,
    Column("account_id", Text, primary_key=True),
    Column("purchases", Integer, nullable=False),
    Column("cents", BigInteger, nullable=False),
)


class Purchase(BaseModel):
    """A purchase, as it is posted and sent."""

    account_id: str
    cents: int


async def add_purchase(session: AsyncSession, purchase: Purchase) -> None:
    """Add a purchase to its account: the handler. The worker commits."""
    new = insert(account).values(account_id=purchase.account_id, purchases=1, cents=purchase.cents)
    await session.execute(
        new.on_conflict_do_update(
            index_elements=[account.c.account_id],
            set_={"purchases": account.c.purchases + 1, "cents": account.c.cents + new.excluded.cents},
        )
    )


async def find_account(session: AsyncSession, account_id: str) -> dict[str, object] | None:
    """Return an account; None if nothing was ever bought for it."""
    found = await session.execute(select(account).where(account.c.account_id == account_id))
    row = found.mappings().one_or_none()
    return None if row is None else dict(row)
