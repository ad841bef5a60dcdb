"""The effect that is measured: each message adds an amount to an account; by handlers' code, and in SQL."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from sqlalchemy.orm import Session

from benchmarks.shared.database import AMOUNT, SCHEMA
from txbox import SqlEffect

UPDATE_ONE = f"UPDATE {SCHEMA}.account SET balance = balance + %s WHERE account_id = %s"
"""The effect of one message: (amount, account)."""


def update_many(change: str) -> str:
    """Return the statement that applies many changes, which is given a query of accounts and amounts.

    It locks the accounts in one order first. An update locks in whatever order its join delivers, and one deadlock
    makes sixteen connections wait for a second.
    """
    return f"""
WITH change (account_id, amount) AS MATERIALIZED ({change}), locked AS MATERIALIZED (
  SELECT account.account_id, change.amount FROM {SCHEMA}.account JOIN change USING (account_id)
  ORDER BY account.account_id FOR NO KEY UPDATE OF account
)
UPDATE {SCHEMA}.account SET balance = balance + locked.amount FROM locked
WHERE account.account_id = locked.account_id"""


UPDATE_MANY = update_many("SELECT * FROM unnest(%s::int[], %s::bigint[])")
"""The effect of many messages: (accounts, amounts)."""

EFFECT = SqlEffect.of(
    update_many(f"SELECT account, count(*) * {AMOUNT} FROM fresh_event GROUP BY account"), fields="account int not null"
)
"""The effect of many messages, as statements over ``fresh_event``."""


def add_to(session: Session, account: int) -> None:
    """Apply one message, on the driver's own cursor."""
    _cursor(session).execute(UPDATE_ONE, (AMOUNT, account))


def add_to_all(session: Session, accounts: Iterable[int]) -> None:
    """Apply a batch, of each message's account, with one statement."""
    totals = Counter(accounts)
    ordered = sorted(totals)
    _cursor(session).execute(UPDATE_MANY, (ordered, [totals[account] * AMOUNT for account in ordered]))


def _cursor(session: Session) -> Any:
    connection = session.connection().connection.dbapi_connection
    assert connection is not None
    return connection.cursor()
