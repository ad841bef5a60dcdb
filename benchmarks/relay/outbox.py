"""The outbox that the relay is measured with: beside the accounts, filled with backlogs, and watched."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy import create_engine

from benchmarks.shared.database import ACCOUNTS, AMOUNT, SCHEMA, Database, conninfo
from benchmarks.shared.measurements import WrongResult
from txbox.outbox import Outbox, Outgoing
from txbox.outbox.lanes import LANES_PER_DESTINATION, lane_of
from txbox.outbox.notifier import CHANNEL
from txbox.outbox.outbox import OutboxStatements

DESTINATION = "benchmark:orders"
BODY = '{"type":"order-placed","order":"0198a1f2-7f6e-7cc1-b5d2-3c1f6a7e9b10","customer":4711,"cents":12345}'

CLAIM_PLAIN = f"""
DELETE FROM {SCHEMA}.plain_outbox WHERE position = ANY(ARRAY(
  SELECT position FROM {SCHEMA}.plain_outbox ORDER BY position LIMIT 1000 FOR UPDATE SKIP LOCKED
)) RETURNING body"""
"""The limit of every relay that deletes: no lanes, no order, nothing sent."""

CLAIM_NEWEST = f"""
DELETE FROM {SCHEMA}.outbox_message WHERE ctid = ANY(ARRAY(
  SELECT ctid FROM {SCHEMA}.outbox_message WHERE due_at IS NULL
  ORDER BY transaction_id LIMIT 1000 FOR UPDATE SKIP LOCKED
)) RETURNING body"""
"""The same from our own table, while nearly nothing waits there."""

FILL_ROWS = 1_000
"""Messages of one transaction when a backlog is made, so that it is not all one transaction's."""

BACKLOG = f"{SCHEMA}.backlog"
COLUMNS = "message_id, destination, key, headers, body"


class BenchmarkOutbox:
    """The tables of one database."""

    def __init__(self, database: Database) -> None:
        """Make the tables that the benchmark needs beside txbox's: a plain outbox, and orders."""
        self._database = database
        self._prepared = 0
        database.execute(
            f"CREATE TABLE {SCHEMA}.plain_outbox (position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
            f'message_id text COLLATE "C" NOT NULL, destination text NOT NULL, key text, headers jsonb NOT NULL, '
            "body bytea NOT NULL, published_at timestamptz NOT NULL DEFAULT now());"
            f"CREATE TABLE {SCHEMA}.purchase_order (order_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
            "account_id int NOT NULL, cents bigint NOT NULL, placed_at timestamptz NOT NULL DEFAULT now())"
        )

    def reset(self) -> None:
        """Start over with an empty outbox, and accounts as at the beginning."""
        self._database.reset(others=("outbox_message", "outbox_sent", "plain_outbox", "purchase_order"))

    def fill(self, count: int, *, plain: bool) -> None:
        """Start over with a backlog, made of what ``Outbox.publish_many`` inserts.

        Args:
            count: messages.
            plain: into the table of the limit.
        """
        self._prepare(count)
        self.reset()
        table, columns = ("plain_outbox", COLUMNS) if plain else ("outbox_message", f"lane, {COLUMNS}")
        for start in range(0, count, FILL_ROWS):
            self._database.execute(
                f"INSERT INTO {SCHEMA}.{table} ({columns}) SELECT {columns} FROM {BACKLOG} "
                f"WHERE number > {start} AND number <= {min(start + FILL_ROWS, count)} ORDER BY number"
            )
        self._database.checkpoint()

    def fill_destinations(self, destinations: int, each: int) -> None:
        """Start over with some messages for each of many destinations, under one key: they go one after the other."""
        self.reset()
        engine, outbox = create_engine(self._database.url), Outbox(schema=SCHEMA, notify=False)
        with engine.begin() as connection:
            for _ in range(each):
                messages = [Outgoing(f"benchmark:{number}", BODY, key="k") for number in range(destinations)]
                outbox.publish_many(connection, messages)
        engine.dispose()
        self._database.checkpoint()

    def must_hold(self, count: int, what: str, *, plain: bool = False) -> None:
        """See that so many messages wait.

        Raises:
            WrongResult: there are more, or fewer.
        """
        table = "plain_outbox" if plain else "outbox_message"
        waiting = self._database.number(f"SELECT count(*) FROM {SCHEMA}.{table}")
        if waiting != count:
            raise WrongResult(f"{what}: {waiting} messages are in the outbox, not {count}")

    def transactions(self) -> int:
        """How many transactions have ended in this database, by its statistics; this one's own come later."""
        return self._database.number(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        )

    @contextmanager
    def old_snapshot(self) -> Iterator[None]:
        """Hold a snapshot, as a long report or a dump does: nothing deleted meanwhile can be removed."""
        with psycopg.connect(conninfo(self._database.url)) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.execute(f"SELECT count(*) FROM {SCHEMA}.account".encode())
            yield

    @contextmanager
    def listener(self) -> Iterator[None]:
        """Hold a connection that listens for notifications."""
        with psycopg.connect(conninfo(self._database.url), autocommit=True) as connection:
            connection.execute(f"LISTEN {CHANNEL}".encode())
            yield

    def _prepare(self, count: int) -> None:
        """Make the table that holds a backlog ready to be copied, once."""
        if self._prepared >= count:
            return
        engine, outbox = create_engine(self._database.url), Outbox(schema=SCHEMA, notify=False)
        self.reset()
        for start in range(0, count, 10 * FILL_ROWS):
            with engine.begin() as connection:
                messages = [Outgoing(DESTINATION, BODY)] * min(10 * FILL_ROWS, count - start)
                outbox.publish_many(connection, messages)
        engine.dispose()
        self._database.execute(
            f"DROP TABLE IF EXISTS {BACKLOG}; CREATE UNLOGGED TABLE {BACKLOG} AS SELECT "
            f"row_number() OVER (ORDER BY position) AS number, lane, {COLUMNS} FROM {SCHEMA}.outbox_message;"
            f"CREATE INDEX ON {BACKLOG} (number); ANALYZE {BACKLOG}"
        )
        self._prepared = count


def transaction_script(*, publish: bool, order: bool) -> tuple[str, dict[str, str | int]]:
    """Return a producer's transaction in pgbench's language, and its variables: an amount onto an account.

    Args:
        publish: with the statement that ``Outbox.publish`` executes, its id made by the server.
        order: with the row of an order too, as a shop's transaction has.
    """
    first_lane = lane_of(DESTINATION, None, "") // LANES_PER_DESTINATION * LANES_PER_DESTINATION
    lines = [
        r"\set n :n + 1",
        rf"\set account random(1, {ACCOUNTS})",
        rf"\set lane {first_lane} + random(0, {LANES_PER_DESTINATION - 1})",
        "BEGIN;",
        f"UPDATE {SCHEMA}.account SET balance = balance + {AMOUNT} WHERE account_id = :account;",
    ]
    if order:
        lines += [f"INSERT INTO {SCHEMA}.purchase_order (account_id, cents) VALUES (:account, {AMOUNT});"]
    if publish:
        # Ids that grow, as the outbox's do; another one for each client.
        message_id = "lpad(to_hex(:n::bigint), 12, '0') || '-' || :client_id::text || '-0198a1f27f6e7cc1b5d'"
        values = {"lane": ":lane::bigint", "message_id": message_id, "key": "NULL", "delay": "NULL", "due_at": "NULL"}
        values |= {name: f":{name}" for name in ("destination", "headers", "body")}
        lines += [OutboxStatements.load(SCHEMA).publish_one % values + ";"]
    variables: dict[str, str | int] = {"n": 0, "destination": DESTINATION, "headers": "{}", "body": BODY}
    return "\n".join([*lines, "COMMIT;\n"]), variables
