"""What bulk loads are tested with: purchases to load, business tables, and the truth worked out without Spark.

``effect`` has no unique key, so that an event that is applied twice is two rows; the balance of an account is a sum, so
that one that is applied to the wrong account, or not at all, is seen too.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Connection, Engine, text

from txbox_spark import BulkLoadFailed, BulkLoadReport, bulk_load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WRITERS = ("copy", "jdbc")
COPY_FIRST = ("copy", pytest.param("jdbc", marks=pytest.mark.slow))
"""Where both writers do the same, one of them is enough to learn soon that it is wrong."""

ACCOUNTS = 20
SUBSCRIBER = "billing"

Purchase = tuple[str | None, int, int]
"""The id of the event, the account, the amount in cents."""

COLUMNS = "event_id string, account_id int, amount bigint"

WRITE_EFFECT = "INSERT INTO effect SELECT event_id, account_id, amount FROM fresh_event"
ADD_UP = """
UPDATE account SET balance = balance + added.amount
FROM (SELECT account_id, sum(amount) AS amount FROM fresh_event GROUP BY account_id) AS added
WHERE account.account_id = added.account_id"""
APPLY = f"{WRITE_EFFECT}; {ADD_UP}"
APPLY_ALLOWED = f"""{APPLY};
  DO $$ BEGIN
    IF EXISTS (SELECT FROM fresh_event JOIN forbidden USING (event_id)) THEN RAISE 'this one is forbidden'; END IF;
  END $$"""
"""Fails for a chunk with an event that the table ``forbidden`` names."""


def purchases(count: int, *, start: int = 0, seed: int = 1) -> list[Purchase]:
    """Make events whose ids differ; each id always comes with the same content."""
    made: list[Purchase] = []
    for number in range(start, start + count):
        content = random.Random(seed * 1_000_003 + number)
        made.append(
            (f"purchase-{content.getrandbits(24):06x}-{number}", number % ACCOUNTS, content.randrange(1, 10**6))
        )
    return made


def as_dicts(events: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return events as JSON has them: by the names of ``COLUMNS``."""
    names = [column.split()[0] for column in COLUMNS.split(", ")]
    return [dict(zip(names, event, strict=True)) for event in events]


def frame(spark: "SparkSession", events: Sequence[Sequence[Any]], columns: str = COLUMNS) -> "DataFrame":
    """Make a DataFrame of several partitions, in an order that is not that of the ids."""
    mixed = list(events)
    random.Random(7).shuffle(mixed)
    return spark.createDataFrame(mixed, columns).repartition(3)


def load(events: "DataFrame", url: str, writer: str, **changed: Any) -> BulkLoadReport:
    """Load events in chunks of a hundred, and apply them; ``changed`` says what is not as usual."""
    given = {
        "subscriber_id": SUBSCRIBER,
        "message_id": "event_id",
        "apply": APPLY,
        "chunk_rows": 100,
        "force": True,
        **changed,
    }
    return bulk_load(events, url=url, writer=writer, **given)


def failed(events: "DataFrame", url: str, writer: str, said: str, **changed: Any) -> BulkLoadFailed:
    """Load events, and return the error that it must fail with."""
    with pytest.raises(BulkLoadFailed, match=said) as raised:
        load(events, url, writer, **changed)
    return raised.value


def write_effect(connection: Connection) -> None:
    """Apply the events as a callable that every executor can import."""
    connection.execute(text(WRITE_EFFECT))
    connection.exec_driver_sql(ADD_UP)


class Books:
    """The business tables ``effect``, ``account`` and ``forbidden``, and what is in them and in the inbox."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE effect (event_id text, account_id int, amount bigint)")
            connection.exec_driver_sql("CREATE TABLE forbidden (event_id text)")
            connection.exec_driver_sql("CREATE TABLE account (account_id int PRIMARY KEY, balance bigint NOT NULL)")
            connection.exec_driver_sql(f"INSERT INTO account SELECT n, 0 FROM generate_series(0, {ACCOUNTS - 1}) AS n")

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        with self._engine.connect() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(statement, values)]

    def run(self, *statements: str) -> None:
        """Run statements, and commit them."""
        with self._engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def record(self, ids: Iterable[str | None], subscriber: str = SUBSCRIBER) -> None:
        """Put ids into the inbox, as live workers that were here before."""
        with self._engine.begin() as connection:
            for one in ids:
                connection.exec_driver_sql(
                    "INSERT INTO processed_message (subscriber_id, message_id) VALUES (%s, %s)", (subscriber, one)
                )

    def inbox(self, subscriber: str = SUBSCRIBER) -> list[str]:
        """The ids in the inbox, sorted."""
        found = self.rows("SELECT message_id FROM processed_message WHERE subscriber_id = %s", subscriber)
        return sorted(row[0] for row in found)

    def effects(self) -> Counter[tuple[Any, ...]]:
        """How often each event was applied."""
        return Counter(self.rows("SELECT event_id, account_id, amount FROM effect"))

    def balances(self) -> dict[int, int]:
        """What each account holds that holds anything."""
        return dict(self.rows("SELECT account_id, balance FROM account WHERE balance <> 0"))

    def staging_tables(self) -> list[str]:
        """The staging tables that are there, without their partitions."""
        found = self.rows(
            "SELECT relname FROM pg_class WHERE relkind = 'p' AND relnamespace = current_schema()::regnamespace "
            "ORDER BY relname"
        )
        return [row[0] for row in found]

    def ledger(self, run_id: str) -> dict[str, Any]:
        """What the ledger says of a run."""
        with self._engine.connect() as connection:
            found = connection.exec_driver_sql("SELECT * FROM bulk_load WHERE run_id = %s", (run_id,))
            return dict(found.mappings().one())

    def chunks(self, run_id: str) -> list[int]:
        """The chunks that are merged."""
        return [row[0] for row in self.rows("SELECT chunk FROM bulk_load_chunk WHERE run_id = %s ORDER BY 1", run_id)]

    def require_applied(self, events: Iterable[Purchase], *, recorded: Iterable[str | None] = ()) -> None:
        """See that each of these was applied once, and nothing else was.

        Args:
            events: those that are to be applied, repeated or not.
            recorded: ids that were in the inbox before.
        """
        once = set(events)
        assert self.effects() == Counter(once)
        assert self.balances() == balances(once)
        assert self.inbox() == sorted({one[0] for one in once} | set(recorded))


def balances(events: Iterable[Purchase]) -> dict[int, int]:
    """Add up what each account holds in the end."""
    sums: Counter[int] = Counter()
    for _, account, amount in events:
        sums[account] += amount
    return dict(sums)


def counts(report: BulkLoadReport) -> Mapping[str, int]:
    """The counts of a report; they must add up."""
    parts = {
        "rejected": report.rejected,
        "duplicate_in_source": report.duplicate_in_source,
        "already_processed": report.already_processed,
        "applied": report.applied,
        **({"parked": report.parked} if report.parked else {}),
    }
    assert report.read == sum(parts.values())
    return {"read": report.read, **parts}
