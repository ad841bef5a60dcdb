"""Business tables for tests of the worker: the truth about what was applied, told by nothing of the worker's own.

``effect`` has no unique key, so that an effect applied twice is two rows; ``position`` tells the order.
"""

from collections import Counter
from collections.abc import Iterable

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from support.waiting import wait_until
from txbox import Message

APPLY = text("INSERT INTO effect (message_id, body) VALUES (:id, :body)")
ADD = text("UPDATE account SET balance = balance + :amount WHERE account_id = :account")

TABLES = """
CREATE TABLE IF NOT EXISTS effect (position bigserial, message_id text NOT NULL, body text NOT NULL);
CREATE TABLE IF NOT EXISTS account (account_id int PRIMARY KEY, balance bigint NOT NULL)"""
NAMES = ["effect", "account"]

ACCOUNTS = "INSERT INTO account VALUES (1, 0), (2, 0) ON CONFLICT DO NOTHING"


class Business:
    """The tables ``effect`` and ``account`` in the engine's search path."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        with engine.begin() as connection:
            connection.exec_driver_sql(f"{TABLES};{ACCOUNTS}")  # one round trip, in more than a thousand tests

    def applied(self) -> Counter[str]:
        """How often each message was applied."""
        return Counter(self.order())

    def order(self, column: str = "message_id") -> list[str]:
        """What was applied, in order."""
        return list(self.rows(f"SELECT {column} FROM effect ORDER BY position"))

    def balance(self, account: int = 1) -> int:
        """What an account holds."""
        return int(self.rows(f"SELECT balance FROM account WHERE account_id = {account}")[0])

    def recorded(self, subscriber: str = "billing") -> set[str]:
        """The ids in the inbox of what is processed."""
        processed = f"subscriber_id = '{subscriber}' AND dead_letter_id IS NULL"
        return set(self.rows(f"SELECT message_id FROM processed_message WHERE {processed}"))

    def failing(self) -> dict[str, int]:
        """The attempts of messages that have failed and are not forgotten."""
        with self.engine.connect() as connection:
            rows = connection.exec_driver_sql("SELECT message_id, attempts FROM message_failure").fetchall()
        return dict(map(tuple, rows))

    def letters(self) -> dict[str, str]:
        """Why each dead letter was parked."""
        with self.engine.connect() as connection:
            rows = connection.exec_driver_sql("SELECT message_id, reason FROM dead_letter").fetchall()
        assert len(rows) == len({row[0] for row in rows}), "a message was parked twice"
        return dict(map(tuple, rows))

    def wait_for_waiter(self) -> None:
        """Wait until some session waits for a lock of another one."""
        wait_until(lambda: self.rows("SELECT 1 FROM pg_stat_activity WHERE cardinality(pg_blocking_pids(pid)) > 0"))

    def rows(self, sql: str) -> list:
        """The first column of a query."""
        with self.engine.connect() as connection:
            return [row[0] for row in connection.exec_driver_sql(sql)]


def apply(session: Session, message: Message) -> None:
    """Apply a message, as a handler does."""
    session.execute(APPLY, {"id": message.id, "body": message.text})


def once(ids: Iterable[str]) -> Counter[str]:
    """What ``Business.applied`` says when each of these was applied once, and nothing else."""
    return Counter(set(ids))
