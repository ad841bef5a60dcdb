"""A streaming query that is killed with SIGKILL in a batch, and started again: with its checkpoint, and without."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from support.spark import sink_process
from support.spark.bulk_loads import WRITERS, Books
from support.spark.event_files import drop
from support.spark.sink_process import GATE
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Event = dict[str, Any]
Start = Callable[..., "subprocess.Popen[str]"]


def events(numbers: range) -> list[Event]:
    return [{"event_id": f"e{number:05}", "account_id": number % 7, "amount": number % 11 + 1} for number in numbers]


RESTARTS = 24

GATED: Event = {"event_id": "gate", "account_id": 3, "amount": 1000}
REFUSED: Event = {"event_id": "e00301 refused", "account_id": 3, "amount": 1000}
"""In one of the first chunks of its batch, and the gate in the last."""

FILES: list[list[Event]] = [
    [*events(range(400)), *events(range(100))],
    [*events(range(300, 700)), GATED, REFUSED],
    events(range(600, 1000)),
]


@pytest.fixture
def books(engine: Engine) -> Books:
    books = Books(engine)
    books.run("ALTER TABLE effect ADD CHECK (event_id !~ 'refused')")
    return books


@pytest.fixture
def landing(tmp_path: Path) -> Path:
    folder = tmp_path / "landing"
    folder.mkdir()
    for rows in FILES:
        drop(folder, rows)
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


def require_applied(books: Books, expected: list[Event]) -> None:
    books.require_applied((one["event_id"], one["account_id"], one["amount"]) for one in expected if one != REFUSED)


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
def test_killed_in_a_batch(engine: Engine, books: Books, start: Start, writer: str, checkpoint: str) -> None:
    settings = {"writer": writer, "chunk_rows": 100, "parallelism": 2, "rejected_to": "table:kept"}
    waiting = f"SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = {GATE} AND NOT granted"
    with engine.connect() as gate:
        gate.exec_driver_sql("SELECT pg_advisory_lock(%s)", (GATE,))
        victim = start(**settings)
        wait_until(lambda: books.rows(waiting) or victim.poll() is not None, "the second batch", timeout=120)
        assert victim.poll() is None
        kill(victim)
        gate.exec_driver_sql("SELECT pg_advisory_unlock(%s)", (GATE,))
        assert victim.returncode == -signal.SIGKILL
    claimed = "SELECT FROM pg_locks WHERE relation = 'bulk_load_chunk'::regclass"
    wait_until(lambda: not books.rows(claimed), "the end of the killed transactions")
    assert len(books.rows("SELECT FROM effect WHERE event_id < 'e00400'")) == 400, "the first batch is committed"
    assert not books.rows("SELECT FROM effect WHERE event_id = 'gate'"), "the chunk in which it was killed is not"
    ((left_behind, source),) = books.rows("SELECT run_id, source FROM bulk_load")
    assert source.endswith(" batch 1")
    applied_before = len(books.rows("SELECT FROM effect"))
    assert len(books.rows("SELECT FROM kept")) == 1

    process = start(checkpoint=checkpoint, **settings)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    require_applied(books, [event for file in FILES for event in file])
    reports = [json.loads(line) for line in said.splitlines()]
    kept = checkpoint == "checkpoint"
    assert [report["batch"] for report in reports] == ([1, 2] if kept else [0, 1, 2])
    assert [report["read"] for report in reports] == [len(file) for file in (FILES[1:] if kept else FILES)]
    # The same batch of the same query is resumed, and its report is of both attempts.
    assert len(books.rows("SELECT FROM kept")) == (1 if kept else 2)
    assert sum(report["applied"] for report in reports) == (601 if kept else 1001 - applied_before)
    # A query that begins anew is another one for Spark: what the old one left is swept when it is old.
    staging = (
        "SELECT FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relname ~ '^bulk_load_staging'"
    )
    assert bool(books.rows(staging)) == (writer == "jdbc" and not kept)
    assert books.rows("SELECT run_id FROM bulk_load") == ([] if kept else [(left_behind,)])


OPEN = "SELECT run_id FROM bulk_load WHERE finished_at IS NULL"
"""Batches that are not at their end."""


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_stream_that_is_restarted_again_and_again(books: Books, start: Start, landing: Path, writer: str) -> None:
    """It is killed at random moments, between batches and within; each third time its checkpoint is lost."""
    expected = [event for file in FILES for event in file]
    for number in range(RESTARTS):
        more = events(range(1000 + 60 * number, 1100 + 60 * number))  # the last 40 come again in the next file
        expected += more
        drop(landing, more)
    settings = {"writer": writer, "chunk_rows": 20, "parallelism": 2}
    moments = random.Random(24)
    left: set[tuple[Any, ...]] = set()
    for restart in range(RESTARTS):
        before = len(books.rows("SELECT FROM effect"))
        victim = start(checkpoint=f"checkpoint-{restart // 3}", **settings)
        wait_until(
            lambda: len(books.rows("SELECT FROM effect")) > before or victim.poll() is not None,  # noqa: B023
            "the next effect",
            timeout=120,
        )
        if victim.poll() is not None:  # it was done
            assert victim.returncode == 0
            break
        if restart % 2:  # within a batch, however short those are here; otherwise wherever it is
            wait_until(
                lambda: books.rows(OPEN) or victim.poll() is not None,  # noqa: B023
                "a batch that is under way",
                timeout=120,
            )
        time.sleep(moments.uniform(0, 0.1 if restart % 2 else 1.5))
        kill(victim)
        left |= set(books.rows(OPEN))
    last = start(checkpoint="checkpoint-last", **settings)
    last.communicate(timeout=600)
    assert last.returncode == 0
    require_applied(books, expected)
    assert restart >= RESTARTS // 2, "otherwise it was done too soon"
    assert left, "otherwise it was never killed within a batch"
