"""A streaming query that is killed with SIGKILL in a batch, and started again: with its checkpoint, and without."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from support.spark import sink_process
from support.spark.bulk_loads import WRITERS
from support.spark.sink_process import GATE
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Event = dict[str, Any]
Start = Callable[..., "subprocess.Popen[str]"]


def events(numbers: range) -> list[Event]:
    return [{"event_id": f"e{number:05}", "account": number % 7, "amount": number % 11 - 5} for number in numbers]


RESTARTS = 24

GATED: Event = {"event_id": "gate", "account": 3, "amount": 1000}
REFUSED: Event = {"event_id": "e00301 refused", "account": 3, "amount": 1000}
"""In one of the first chunks of its batch, and the gate in the last."""

FILES: list[list[Event]] = [
    [*events(range(400)), *events(range(100))],
    [*events(range(300, 700)), GATED, REFUSED],
    events(range(600, 1000)),
]


@pytest.fixture
def landing(tmp_path: Path, engine: Engine) -> Path:
    """The files, and the tables that they change."""
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE effect (event_id text CHECK (event_id !~ 'refused'))")
        connection.exec_driver_sql("CREATE TABLE account (account_id int PRIMARY KEY, balance bigint NOT NULL)")
        connection.exec_driver_sql("INSERT INTO account SELECT n, 0 FROM generate_series(0, 6) AS n")
    folder = tmp_path / "landing"
    folder.mkdir()
    for number, rows in enumerate(FILES):
        path = folder / f"{number}.json"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        os.utime(path, (1_000_000_000 + number, 1_000_000_000 + number))  # Spark takes the oldest file first
    return folder


@pytest.fixture
def start(fresh_database: str, landing: Path, tmp_path: Path) -> Iterator[Start]:
    """Start the query's process, and see that none outlives the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*, checkpoint: str = "checkpoint", **settings: Any) -> "subprocess.Popen[str]":
        place = {"url": fresh_database, "landing": str(landing), "checkpoint": str(tmp_path / checkpoint)}
        processes.append(sink_process.start(**place, **settings))
        return processes[-1]

    yield start
    for process in processes:
        kill(process)


def kill(process: "subprocess.Popen[str]") -> None:
    """Kill the driver and its JVM at once; the JVM's Python workers end when they find it gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=20)


def rows(engine: Engine, sql: str) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(sql)]


def assert_applied_once(engine: Engine, expected: list[Event]) -> None:
    first = {event["event_id"]: event for event in expected if event != REFUSED}
    balances = Counter(dict.fromkeys(range(7), 0))
    for event in first.values():
        balances[event["account"]] += event["amount"]
    ids = sorted((one,) for one in first)
    assert sorted(rows(engine, "SELECT event_id FROM effect")) == ids
    assert sorted(rows(engine, "SELECT message_id FROM processed_message")) == ids
    assert dict(rows(engine, "SELECT * FROM account")) == dict(balances)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("writer", "checkpoint"),
    [
        pytest.param("copy", "checkpoint", id="copy, checkpoint kept"),
        pytest.param("copy", "another", id="copy, checkpoint lost"),
        pytest.param("jdbc", "checkpoint", id="jdbc, checkpoint kept"),
        pytest.param("jdbc", "another", id="jdbc, checkpoint lost"),
    ],
)
def test_killed_in_a_batch(engine: Engine, start: Start, writer: str, checkpoint: str) -> None:
    settings = {"writer": writer, "chunk_rows": 100, "parallelism": 2, "rejected_to": "table:kept"}
    waiting = f"SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = {GATE} AND NOT granted"
    with engine.connect() as gate:
        gate.exec_driver_sql("SELECT pg_advisory_lock(%s)", (GATE,))
        victim = start(**settings)
        wait_until(lambda: rows(engine, waiting) or victim.poll() is not None, "the second batch", timeout=120)
        assert victim.poll() is None
        kill(victim)
        gate.exec_driver_sql("SELECT pg_advisory_unlock(%s)", (GATE,))
        assert victim.returncode == -signal.SIGKILL
    claimed = "SELECT FROM pg_locks WHERE relation = 'bulk_load_chunk'::regclass"
    wait_until(lambda: not rows(engine, claimed), "the end of the killed transactions")
    assert len(rows(engine, "SELECT FROM effect WHERE event_id < 'e00400'")) == 400, "the first batch is committed"
    assert not rows(engine, "SELECT FROM effect WHERE event_id = 'gate'"), "the chunk in which it was killed is not"
    ((left_behind, source),) = rows(engine, "SELECT run_id, source FROM bulk_load")
    assert source.endswith(" batch 1")
    applied_before = len(rows(engine, "SELECT FROM effect"))
    assert len(rows(engine, "SELECT FROM kept")) == 1

    process = start(checkpoint=checkpoint, **settings)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert_applied_once(engine, [event for file in FILES for event in file])
    reports = [json.loads(line) for line in said.splitlines()]
    kept = checkpoint == "checkpoint"
    assert [report["batch"] for report in reports] == ([1, 2] if kept else [0, 1, 2])
    assert [report["read"] for report in reports] == [len(file) for file in (FILES[1:] if kept else FILES)]
    # The same batch of the same query is resumed, and its report is of both attempts.
    assert len(rows(engine, "SELECT FROM kept")) == (1 if kept else 2)
    assert sum(report["applied"] for report in reports) == (601 if kept else 1001 - applied_before)
    # A query that begins anew is another one for Spark: what the old one left is swept when it is old.
    staging = (
        "SELECT FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relname ~ '^bulk_load_staging'"
    )
    assert bool(rows(engine, staging)) == (writer == "jdbc" and not kept)
    assert rows(engine, "SELECT run_id FROM bulk_load") == ([] if kept else [(left_behind,)])


OPEN = "SELECT run_id FROM bulk_load WHERE finished_at IS NULL"
"""Batches that are not at their end."""


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_stream_that_is_restarted_again_and_again(engine: Engine, start: Start, landing: Path, writer: str) -> None:
    """It is killed at random moments, between batches and within; each third time its checkpoint is lost."""
    expected = [event for file in FILES for event in file]
    for number in range(RESTARTS):
        more = events(range(1000 + 60 * number, 1100 + 60 * number))  # the last 40 come again in the next file
        expected += more
        path = landing / f"{number + len(FILES)}.json"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in more), encoding="utf-8")
    settings = {"writer": writer, "chunk_rows": 20, "parallelism": 2}
    moments = random.Random(24)
    left: set[tuple[Any, ...]] = set()
    for restart in range(RESTARTS):
        before = len(rows(engine, "SELECT FROM effect"))
        victim = start(checkpoint=f"checkpoint-{restart // 3}", **settings)
        wait_until(
            lambda: len(rows(engine, "SELECT FROM effect")) > before or victim.poll() is not None,  # noqa: B023
            "the next effect",
            timeout=120,
        )
        if victim.poll() is not None:  # it was done
            assert victim.returncode == 0
            break
        if restart % 2:  # within a batch, however short those are here; otherwise wherever it is
            wait_until(
                lambda: rows(engine, OPEN) or victim.poll() is not None,  # noqa: B023
                "a batch that is under way",
                timeout=120,
            )
        time.sleep(moments.uniform(0, 0.1 if restart % 2 else 1.5))
        kill(victim)
        left |= set(rows(engine, OPEN))
    last = start(checkpoint="checkpoint-last", **settings)
    last.communicate(timeout=600)
    assert last.returncode == 0
    assert_applied_once(engine, expected)
    assert restart >= RESTARTS // 2, "otherwise it was done too soon"
    assert left, "otherwise it was never killed within a batch"
