"""Where the relay's benchmark happens: an outbox beside the accounts of the business."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from business import ACCOUNTS, SCHEMA, Business, WrongResult, conninfo
from sqlalchemy import create_engine

from txbox.outbox import Outbox, Outgoing
from txbox.outbox.notifier import CHANNEL

__all__ = ["BARE_CLAIM", "BODY", "COLUMNS", "DESTINATION", "RAW_CLAIM", "OutboxPlace"]

DESTINATION = "benchmark:orders"
BODY = '{"type":"order-placed","order":"0198a1f2-7f6e-7cc1-b5d2-3c1f6a7e9b10","customer":4711,"cents":12345}'

RAW_ROWS = 1_000
RAW_CLAIM = f"""
DELETE FROM {SCHEMA}.raw_outbox WHERE position = ANY(ARRAY(
  SELECT position FROM {SCHEMA}.raw_outbox ORDER BY position LIMIT {RAW_ROWS} FOR UPDATE SKIP LOCKED
)) RETURNING *"""
"""The limit of every relay that deletes: no lanes, no order, nothing sent."""

BARE_CLAIM = f"""
DELETE FROM {SCHEMA}.outbox_message WHERE ctid = ANY(ARRAY(
  SELECT ctid FROM {SCHEMA}.outbox_message WHERE due_at IS NULL
  ORDER BY transaction_id LIMIT {RAW_ROWS} FOR UPDATE SKIP LOCKED
)) RETURNING body"""
"""The same from our own table, for whoever takes each message as soon as it is there."""

FILL_ROWS = 1_000
"""Messages of one transaction when a backlog is made, so that it is not all one transaction's."""

COLUMNS = "message_id, destination, key, headers, body"

_TABLES = ("outbox_message", "outbox_sent", "raw_outbox", "purchase_order")


class OutboxPlace:
    """The outbox of the benchmark's schema."""

    def __init__(self, url: str, business: Business) -> None:
        """Take the business, which makes the outbox in its schema when it is entered."""
        self.url = url
        self._business = business
        self._backlogs: dict[bool, int] = {}

    def create(self) -> None:
        """Create the tables beside the business's: of the limit, and of orders."""
        self._business.execute(
            f"CREATE TABLE {SCHEMA}.raw_outbox (position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
            f'message_id text COLLATE "C" NOT NULL, destination text NOT NULL, key text, headers jsonb NOT NULL, '
            "body bytea NOT NULL, published_at timestamptz NOT NULL DEFAULT now())"
        )
        self._business.execute(
            f"CREATE TABLE {SCHEMA}.purchase_order (order_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
            "account_id int NOT NULL, cents bigint NOT NULL, placed_at timestamptz NOT NULL DEFAULT now())"
        )

    def reset(self) -> None:
        """Start over with an empty outbox, and accounts as at the beginning."""
        self._business.execute(f"TRUNCATE {', '.join(f'{SCHEMA}.{table}' for table in _TABLES)}")
        self._business.reset()
        self._business.execute(f"VACUUM ANALYZE {SCHEMA}.outbox_message")

    def fill(self, count: int, *, keyed: bool = False) -> None:
        """Start over with a backlog, made of what ``Outbox.publish_many`` inserts.

        Args:
            count: messages.
            keyed: each with one of 10,000 keys; otherwise without.
        """
        self.reset()
        self._copy("outbox_message", f"lane, {COLUMNS}", self._backlog(count, keyed), count)

    def fill_raw(self, count: int) -> None:
        """Start over with the same backlog in the table of the limit."""
        self.reset()
        self._copy("raw_outbox", COLUMNS, self._backlog(count, keyed=False), count)

    def waiting(self, table: str = "outbox_message") -> int:
        """How many messages are in a table."""
        return self._business.number(f"SELECT count(*) FROM {SCHEMA}.{table}")

    def must_be_empty(self, what: str, table: str = "outbox_message") -> None:
        """See that everything was sent.

        Raises:
            WrongResult: it was not.
        """
        if waiting := self.waiting(table):
            raise WrongResult(f"{what}: {waiting} messages are still in {table}")

    def sizes(self) -> tuple[float, float]:
        """The outbox's table and its indexes, in MiB."""
        heap = self._business.number(f"SELECT pg_table_size('{SCHEMA}.outbox_message')")
        indexes = self._business.number(f"SELECT pg_indexes_size('{SCHEMA}.outbox_message')")
        return heap / 2**20, indexes / 2**20

    def transactions(self) -> int:
        """How many transactions have ended in this database, by its statistics; this one's own come later."""
        return self._business.number(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        )

    @contextmanager
    def old_snapshot(self) -> Iterator[None]:
        """Hold a snapshot, as a long report or a dump does: nothing deleted meanwhile can be removed."""
        with psycopg.connect(conninfo(self.url)) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.execute(f"SELECT count(*) FROM {SCHEMA}.account".encode())
            yield

    @contextmanager
    def listener(self) -> Iterator[None]:
        """Hold a connection that listens for the bell."""
        with psycopg.connect(conninfo(self.url), autocommit=True) as connection:
            connection.execute(f"LISTEN {CHANNEL}".encode())
            yield

    def _backlog(self, count: int, keyed: bool) -> str:
        """Return the table that holds a backlog ready to be copied, made once."""
        name = f"{SCHEMA}.backlog_{'keyed' if keyed else 'plain'}"
        if self._backlogs.get(keyed, 0) < count:
            engine, outbox = create_engine(self.url), Outbox(schema=SCHEMA, notify=False)
            self.reset()
            for start in range(0, count, 10 * FILL_ROWS):
                numbers = range(start, min(start + 10 * FILL_ROWS, count))
                with engine.begin() as connection:
                    outbox.publish_many(
                        connection,
                        (Outgoing(DESTINATION, BODY, str(number % ACCOUNTS) if keyed else None) for number in numbers),
                    )
            engine.dispose()
            self._business.execute(f"DROP TABLE IF EXISTS {name}")
            self._business.execute(
                f"CREATE UNLOGGED TABLE {name} AS SELECT row_number() OVER (ORDER BY position) AS number, lane, "
                f"{COLUMNS} FROM {SCHEMA}.outbox_message"
            )
            self._business.execute(f"CREATE INDEX ON {name} (number)")
            self._business.execute(f"VACUUM ANALYZE {name}")
            self._backlogs[keyed] = count
            self.reset()
        return name

    def _copy(self, table: str, columns: str, backlog: str, count: int) -> None:
        for start in range(0, count, FILL_ROWS):
            self._business.execute(
                f"INSERT INTO {SCHEMA}.{table} ({columns}) SELECT {columns} FROM {backlog} "
                f"WHERE number > {start} AND number <= {min(start + FILL_ROWS, count)} ORDER BY number"
            )
        self._business.checkpoint()
