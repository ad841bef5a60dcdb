"""Bulk loads for which the JVM has too little memory: a heap that is really full, in a program of its own."""

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from sqlalchemy import Engine

from support.program import Running, left_in
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OUT_OF_MEMORY = "txbox: Spark's JVM ran out of memory; give it more: spark.driver.memory=4g (--conf, "


def failed(events: Path, url: str, memory: str, *more: str) -> str:
    """Run the command with a heap of this size; it fails, leaves no JVM, and says this in one line."""
    apply = events.with_name("apply.sql")
    apply.write_text("INSERT INTO effect SELECT id FROM fresh_event")
    what = ("--subscriber", "billing", "--message-id", "id", "--apply", str(apply), "--url", url)
    spark = ("--master", "local[2]", "--writer", "copy", "--conf", f"spark.driver.memory={memory}")
    with Running("bulk-load", str(events), *what, *spark, *more, start_new_session=True) as running:
        assert running.wait(timeout=300) == 1, running.err
        wait_until(lambda: left_in(running.process.pid) == [], "its JVM follows it", timeout=30)
    assert running.out == []
    (said,) = [line for line in running.err if "tasks" not in line and "chunks, " not in line]
    return said


@pytest.fixture
def effect(engine: Engine) -> Engine:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE effect (id text)")
    return engine


def test_a_line_that_does_not_fit(effect: Engine, fresh_database: str, tmp_path: Path) -> None:
    """There is no run yet: the file is read to see what it is."""
    events = tmp_path / "events.jsonl"
    events.write_text(f'{{"id": "e1", "body": "{"x" * 300_000_000}"}}\n')
    said = failed(events, fresh_database, "512m")
    assert said.startswith(OUT_OF_MEMORY)
    assert said.endswith("; then run it again\n")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("-Da=b", id="the JVM ends"),
        pytest.param("-XX:-ExitOnOutOfMemoryError", id="Spark ends the JVM"),
        pytest.param("-XX:MaxDirectMemorySize=16m", id="Arrow gets none, and the JVM goes on"),
    ],
)
def test_rows_that_do_not_fit(effect: Engine, fresh_database: str, tmp_path: Path, options: str) -> None:
    """There is a run: the ids are read first, and they fit."""
    events = tmp_path / "events.parquet"
    parquet.write_table(pyarrow.table({"id": ["e1", "e2", "e3"], "body": ["x" * 150_000_000] * 3}), events)
    said = failed(events, fresh_database, "512m", "--conf", f"spark.driver.extraJavaOptions={options}")
    with effect.connect() as connection:
        run_id = connection.exec_driver_sql("SELECT run_id FROM bulk_load").scalar_one()
    assert said.startswith(OUT_OF_MEMORY)
    assert f"resume run {run_id}" in said


def test_a_heap_with_which_spark_does_not_start(effect: Engine, fresh_database: str, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text('{"id": "e1"}\n')
    said = failed(events, fresh_database, "300m")
    assert said.startswith("txbox: Spark does not start: ")
    assert "give it more: spark.driver.memory=4g" in said
