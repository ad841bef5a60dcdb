"""The database that is measured in: the tables of txbox, and 10,000 accounts that each message adds an amount to.

Everything lives in a schema of its own, which is dropped at the end, so a benchmark can run in any database.
"""

from collections.abc import Sequence

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from benchmarks.shared.measurements import WrongResult
from txbox.schema import tables

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

SETTINGS = ("fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size", "wal_sync_method")
"""What decides what a commit costs."""


class Database:
    """Made once, made empty before each measurement, checked after it."""

    def __init__(self, url: str) -> None:
        """Connect, as SQLAlchemy's URL says, and make the tables anew."""
        self.url = url
        self._connection = psycopg.connect(conninfo(url), autocommit=True)
        self._seeds = 0

    def __enter__(self) -> "Database":
        self.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE; CREATE SCHEMA {SCHEMA}")
        engine = create_engine(self.url)
        tables(SCHEMA).metadata.create_all(engine)
        engine.dispose()
        self.execute(
            # Room on each page, so that updates stay on it and none of the sides is slowed down by its own speed.
            f"CREATE TABLE {SCHEMA}.account (account_id int PRIMARY KEY, balance bigint NOT NULL) WITH (fillfactor=50)"
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.execute(f"DROP SCHEMA {SCHEMA} CASCADE")
        self._connection.close()

    def reset(self, seeds: Sequence[str] = (), others: Sequence[str] = (), accounts: int = ACCOUNTS) -> None:
        """Start over: no growth, no dead rows, no pending checkpoint that the next measurement would pay for.

        Args:
            seeds: ids to record beforehand; ``recorded`` does not count them.
            others: tables to empty, beside the accounts and the inbox.
            accounts: how many there are to be.
        """
        self._seeds = len(seeds)
        for name in ("processed_message", "account", *others):
            self.execute(f"TRUNCATE {SCHEMA}.{name}")
        self.execute(f"INSERT INTO {SCHEMA}.account SELECT number, 0 FROM generate_series(1, {accounts}) AS number")
        if seeds:
            with self._connection.cursor() as cursor:
                cursor.executemany(INSERT_ONE.encode(), [(seed,) for seed in seeds])
        for name in ("processed_message", "account", *others):
            self.execute(f"VACUUM ANALYZE {SCHEMA}.{name}")
        self.checkpoint()

    @property
    def backend(self) -> int:
        """The PID of the server process that this works with."""
        return self._connection.info.backend_pid

    def checkpoint(self) -> None:
        """Have nothing pending that a measurement would pay for, if the user may."""
        try:
            self.execute("CHECKPOINT")
        except psycopg.errors.InsufficientPrivilege:
            return

    def recorded(self) -> int:
        """How many messages the inbox holds, without the seeds."""
        return self.number(f"SELECT count(*) FROM {SCHEMA}.processed_message") - self._seeds

    def check(self, applied: int, what: str) -> None:
        """See that this many messages have been applied, no more and no fewer.

        Raises:
            WrongResult: they have not.
        """
        balance = self.number(f"SELECT sum(balance) FROM {SCHEMA}.account")
        if balance != applied * AMOUNT:
            raise WrongResult(f"{what}: the balances add up to {balance}, not to {applied} x {AMOUNT}")

    def description(self) -> dict[str, str]:
        """The server's version, such as 18.1, and its settings."""
        version = self._connection.info.parameter_status("server_version") or ""
        return {"version": version, **{name: str(self._value(f"SHOW {name}")) for name in SETTINGS}}

    def execute(self, statements: str) -> None:
        """Execute statements, in a transaction of their own."""
        self._connection.execute(statements.encode())

    def number(self, query: str) -> int:
        """Return the one number that a query finds."""
        return int(str(self._value(query)))

    def _value(self, query: str) -> object:
        row = self._connection.execute(query.encode()).fetchone()
        return row[0] if row else None


def conninfo(url: str) -> str:
    """Return an SQLAlchemy URL as psycopg's own connection string."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
