"""What the tests of loads on a cluster share: the events, what they must come to, and a gate that holds a task."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Connection, Engine, create_engine

from support.spark.spark_cluster import Cluster, Driver, client_of, spark_cluster
from support.waiting import wait_until
from txbox import Inbox
from txbox.schema import tables

GATE = 4713
"""The advisory lock that tests hold to keep a task where it is."""
APPLY = """
INSERT INTO effect SELECT event_id FROM fresh_event;
UPDATE account SET balance = balance + added.amount
FROM (SELECT account, sum(amount) AS amount FROM fresh_event GROUP BY account) AS added
WHERE account.account_id = added.account
"""
SPECULATING = {
    "spark__speculation": "true",
    "spark__speculation__interval": "50ms",
    "spark__speculation__quantile": "0.1",
    "spark__speculation__multiplier": "1.1",
    "spark__speculation__minTaskRuntime": "200ms",
}
ROWS, DISTINCT = 6_000, 4_000
SPECIAL = f"e{DISTINCT - 1:07}"
"""An id that one row has, in the last chunk."""
CHUNKS = {"parallelism": 4, "chunk_rows": 1_500}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master and two workers."""
    with spark_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def engine(fresh_database: str) -> Iterator[Engine]:
    """An engine on a database of the test's own, with our tables, the business's, and some ids in the inbox."""
    engine = create_engine(fresh_database, pool_size=20)
    with engine.begin() as connection:
        tables().metadata.create_all(connection)
        connection.exec_driver_sql("CREATE TABLE effect (event_id text NOT NULL)")
        connection.exec_driver_sql("CREATE TABLE account (account_id int PRIMARY KEY, balance bigint NOT NULL)")
        connection.exec_driver_sql("INSERT INTO account SELECT n, 0 FROM generate_series(0, 6) AS n")
        Inbox("billing").record_many(connection, [f"e{number:07}" for number in range(0, DISTINCT, 10)])
    yield engine
    engine.dispose()


@pytest.fixture
def gate(engine: Engine) -> Iterator[Connection]:
    """A session that holds the gate."""
    with holding_gate(engine) as connection:
        yield connection


def emptied(engine: Engine) -> None:
    """Take back what a load has done."""
    execute(engine, "TRUNCATE effect, bulk_load, bulk_load_chunk", "UPDATE account SET balance = 0")
    execute(engine, "DELETE FROM processed_message WHERE right(message_id, 1) <> '0'")


def execute(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def rows(engine: Engine, sql: str) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(sql)]


def at_the_gate(engine: Engine, count: int = 1) -> list[int]:
    """Wait until so many server processes wait at the gate, and return them."""
    waiting = f"SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = {GATE} AND NOT granted ORDER BY pid"
    found = wait_until(
        lambda: pids if len(pids := rows(engine, waiting)) >= count else [], f"{count} at the gate", timeout=120
    )
    return [pid for (pid,) in found]


@contextmanager
def holding_gate(engine: Engine) -> Iterator[Connection]:
    """A session that holds the gate until it is opened, or the block ends."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"SELECT pg_advisory_lock({GATE})")
        yield connection
        connection.exec_driver_sql("SELECT pg_advisory_unlock_all()")


def stopped_in_copy(engine: Engine) -> tuple[int, psutil.Process]:
    """Stop a task in its COPY; return its server process and its Python."""
    copying = "SELECT pid FROM pg_stat_activity WHERE query ~ '^COPY' AND state = 'active'"

    def stopped() -> tuple[int, psutil.Process] | None:
        for (backend,) in rows(engine, copying):
            worker = client_of(engine, backend)
            worker.suspend()
            # All that was sent has arrived when the server waits for more, so it is not the end that it will read.
            waiting = f"{copying} AND pid = {backend} AND wait_event = 'ClientRead'"
            if any(rows(engine, waiting) for _ in range(50)):
                return backend, worker
            worker.resume()
        return None

    return wait_until(stopped, "a task in its COPY", timeout=120, every=0.001)


def open_gate(gate: Connection) -> None:
    gate.exec_driver_sql(f"SELECT pg_advisory_unlock({GATE})")


def wait_in_the_merge(engine: Engine) -> None:
    """Have the task that records the special event wait at the gate; tasks of other chunks pass."""
    execute(
        engine,
        f"CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN PERFORM pg_advisory_xact_lock({GATE}); RETURN NEW; END $$",
        "CREATE TRIGGER gate BEFORE INSERT ON processed_message FOR EACH ROW "
        f"WHEN (NEW.message_id = '{SPECIAL}') EXECUTE FUNCTION wait_at_gate()",
    )


def assert_exact(engine: Engine, report: dict[str, Any]) -> None:
    """Compare the report and the database with what Python finds in the same events."""
    source = [None if number % 97 == 96 else number % DISTINCT for number in range(ROWS)]
    ids = {one for one in source if one is not None}
    before = set(range(0, DISTINCT, 10))
    balances = Counter(dict.fromkeys(range(7), 0))
    for one in ids - before:
        balances[one % 7] += one % 11 - 5
    assert {name: report[name] for name in ("read", "rejected", "already_processed", "applied")} == {
        "read": ROWS,
        "rejected": source.count(None),
        "already_processed": len(ids & before),
        "applied": len(ids - before),
    }
    assert report["duplicate_in_source"] == ROWS - source.count(None) - len(ids)
    assert sorted(rows(engine, "SELECT event_id FROM effect")) == sorted((f"e{one:07}",) for one in ids - before)
    assert dict(rows(engine, "SELECT * FROM account")) == dict(balances)
    recorded = rows(engine, "SELECT message_id FROM processed_message")
    assert sorted(recorded) == sorted((f"e{one:07}",) for one in ids | before)
    assert rows(engine, "SELECT FROM bulk_load WHERE finished_at IS NULL") == []
    staging = "SELECT relname FROM pg_class WHERE relname ~ '^bulk_load_staging'"
    assert rows(engine, staging) == []


def request(url: str, **arguments: Any) -> dict[str, Any]:
    return {"rows": ROWS, "distinct": DISTINCT, "url": url, "apply": APPLY, **CHUNKS, **arguments}


def failed_tasks(driver: Driver) -> list[str]:
    """Why tasks have failed; tasks that lost against another attempt have not."""
    ends = [event["Task End Reason"]["Reason"] for event in driver.events("TaskEnd")]
    return [reason for reason in ends if reason not in ("Success", "TaskKilled", "TaskCommitDenied")]


def speculated(driver: Driver) -> list[dict[str, Any]]:
    """The attempts that Spark has begun while another was running."""
    return [event["Task Info"] for event in driver.events("TaskStart") if event["Task Info"]["Speculative"]]


def python_without(folder: Path, module: str) -> str:
    """Return a program that is this Python but for one module."""
    hidden = folder / "hidden"
    hidden.mkdir()
    (hidden / f"{module}.py").write_text(f"raise ModuleNotFoundError({module!r}, name={module!r})\n")
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{hidden}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return str(program)
