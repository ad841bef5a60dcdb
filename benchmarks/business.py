"""The business that every benchmark does: money onto one of 10,000 accounts, beside an inbox of its own.

Everything lives in a schema of its own, which is dropped at the end, so a benchmark can run in any database.
"""

from collections.abc import Sequence

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from txbox.schema import tables

__all__ = ["ACCOUNTS", "AMOUNT", "INSERT_MANY", "INSERT_ONE", "SCHEMA", "SUBSCRIBER", "UPDATE_MANY", "UPDATE_ONE"]
__all__ += ["Business", "WrongResult", "conninfo", "update_many"]

SCHEMA = "txbox_benchmark"
SUBSCRIBER = "benchmark"
ACCOUNTS = 10_000
AMOUNT = 3
"""What each message adds to its account."""

INSERT_ONE = f"""
INSERT INTO {SCHEMA}.processed_message (subscriber_id, message_id) VALUES ('{SUBSCRIBER}', %s)
ON CONFLICT DO NOTHING"""
"""A record written by hand: (id); the row count says whether it is first."""

INSERT_MANY = f"""
INSERT INTO {SCHEMA}.processed_message (subscriber_id, message_id) SELECT '{SUBSCRIBER}', unnest(%s::text[])
ON CONFLICT DO NOTHING RETURNING message_id"""
"""The same for many, given sorted: (ids) → the ids that are first."""

UPDATE_ONE = f"UPDATE {SCHEMA}.account SET balance = balance + %s WHERE account_id = %s"
"""The effect of one message: (amount, account)."""


def update_many(change: str, before: str = "") -> str:
    """Return the statement that applies many changes.

    It locks the accounts in one order first. An update locks in whatever order its join delivers, and one deadlock
    makes sixteen connections wait for a second.

    Args:
        change: a query of accounts and amounts.
        before: named queries that it uses, each with a comma after it.
    """
    return f"""
WITH {before}change (account_id, amount) AS MATERIALIZED ({change}), locked AS MATERIALIZED (
  SELECT account.account_id, change.amount FROM {SCHEMA}.account JOIN change USING (account_id)
  ORDER BY account.account_id FOR NO KEY UPDATE OF account
)
UPDATE {SCHEMA}.account SET balance = balance + locked.amount FROM locked
WHERE account.account_id = locked.account_id"""


UPDATE_MANY = update_many("SELECT * FROM unnest(%s::int[], %s::bigint[])")
"""The effect of many messages: (accounts, amounts)."""


class WrongResult(Exception):
    """A measurement left other balances than its messages add up to: its figure is worth nothing."""


class Business:
    """The accounts and the inbox: made once, made empty before each measurement, checked after it."""

    def __init__(self, url: str) -> None:
        """Name the database; nothing is connected."""
        self._url = url
        self._connection: psycopg.Connection | None = None
        self._seeds = 0

    def __enter__(self) -> "Business":
        connection = psycopg.connect(conninfo(self._url), autocommit=True)
        connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
        connection.execute(f"CREATE SCHEMA {SCHEMA}")
        engine = create_engine(self._url)
        tables(SCHEMA).metadata.create_all(engine)
        engine.dispose()
        connection.execute(
            # Room on each page, so that updates stay on it and none of the sides is slowed down by its own speed.
            f"CREATE TABLE {SCHEMA}.account (account_id int PRIMARY KEY, balance bigint NOT NULL) WITH (fillfactor=50)"
        )
        self._connection = connection
        return self

    def __exit__(self, *_: object) -> None:
        self.execute(f"DROP SCHEMA {SCHEMA} CASCADE")
        self._entered.close()

    def reset(self, seeds: Sequence[str] = ()) -> None:
        """Start over: no growth, no dead rows, no pending checkpoint that the next measurement would pay for.

        Args:
            seeds: ids to record beforehand; ``recorded`` does not count them.
        """
        self._seeds = len(seeds)
        self.execute(f"TRUNCATE {SCHEMA}.processed_message, {SCHEMA}.account")
        self.execute(f"INSERT INTO {SCHEMA}.account SELECT number, 0 FROM generate_series(1, {ACCOUNTS}) AS number")
        if seeds:
            with self._entered.cursor() as cursor:
                cursor.executemany(INSERT_ONE.encode(), [(seed,) for seed in seeds])
        self.execute(f"VACUUM ANALYZE {SCHEMA}.processed_message, {SCHEMA}.account")
        self.checkpoint()

    def checkpoint(self) -> None:
        """Have nothing pending that a measurement would pay for, if the user may."""
        try:
            self.execute("CHECKPOINT")
        except psycopg.errors.InsufficientPrivilege:
            return

    def recorded(self) -> int:
        """How many messages the inbox holds, without the seeds."""
        return self.number(f"SELECT count(*) FROM {SCHEMA}.processed_message") - self._seeds

    def wal_syncs(self) -> tuple[int, float]:
        """How often the write-ahead log was synced so far, and how long that took, in milliseconds.

        The time is 0 unless the server has track_wal_io_timing.
        """
        try:
            row = self._entered.execute(
                "SELECT sum(fsyncs), sum(fsync_time) FROM pg_stat_io WHERE object = 'wal'"
            ).fetchone()
        except psycopg.Error:  # before PostgreSQL 18
            row = None
        return (int(row[0] or 0), float(row[1] or 0)) if row else (0, 0.0)

    def check(self, applied: int, what: str) -> None:
        """See that this many messages have been applied, no more and no fewer.

        Raises:
            WrongResult: they have not.
        """
        balance = self.number(f"SELECT sum(balance) FROM {SCHEMA}.account")
        if balance != applied * AMOUNT:
            raise WrongResult(f"{what}: the balances add up to {balance}, not to {applied} x {AMOUNT}")

    def server_version(self) -> str:
        """The server's version, such as 18.1."""
        return self._entered.info.parameter_status("server_version") or ""

    def settings(self) -> dict[str, str]:
        """The server's settings that decide what a commit costs."""
        names = ("fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size", "wal_sync_method")
        return {name: str(self._value(f"SHOW {name}")) for name in names}

    @property
    def _entered(self) -> psycopg.Connection:
        if self._connection is None:
            raise RuntimeError("not entered")
        return self._connection

    def execute(self, statement: str) -> None:
        """Execute a statement, in a transaction of its own."""
        self._entered.execute(statement.encode())

    def _value(self, query: str) -> object:
        row = self._entered.execute(query.encode()).fetchone()
        return row[0] if row else None

    def number(self, query: str) -> int:
        """Return the one number that a query finds."""
        return int(str(self._value(query)))


def conninfo(url: str) -> str:
    """Return an SQLAlchemy URL as psycopg's own connection string."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
