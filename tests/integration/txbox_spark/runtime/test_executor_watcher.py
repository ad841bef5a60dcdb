"""Loads on a cluster that has no executor for them, or none any more: what the command says, and that it ends."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine

from support.spark.cluster_loads import (
    APPLY,
    DISTINCT,
    ROWS,
    at_the_gate,
    holding_gate,
    rows,
    wait_in_the_merge,
)
from support.spark.short_life import SHORT_LIFE
from support.spark.spark_cluster import HOSTS, Cluster, processes_of
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BOUND = 20
"""How long the loads wait for an executor: a little longer than until they say so."""


@contextmanager
def loading(cluster: Cluster, url: str, folder: Path, memory: str) -> "Iterator[subprocess.Popen[str]]":
    """Run the command, with executors of so much memory; ``stderr`` in the folder gets what it says."""
    events, script = folder / "events.jsonl", folder / "account.sql"
    one = {"account": 1, "amount": 1, "payload": "x" * 1_000}  # too many bytes to be merged by the driver
    lines = (json.dumps({"event_id": f"e{number % DISTINCT:07}", **one}) for number in range(ROWS))
    events.write_text("\n".join(lines))
    script.write_text(APPLY)
    settings = {
        "spark.executor.memory": memory,
        "spark.executor.extraJavaOptions": SHORT_LIFE,
        "spark.driver.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "4",
    }
    with (folder / "stderr").open("w") as said:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("txbox")),
                *("bulk-load", str(events), "--subscriber", "billing", "--message-id", "event_id"),
                *("--url", url, "--apply", str(script), "--writer", "copy", "--chunk-rows", "1500"),
                *("--master", cluster.url, "--executor-seconds", str(BOUND)),
                *(part for name, value in settings.items() for part in ("--conf", f"{name}={value}")),
            ],
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            stderr=said,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


def test_more_memory_than_a_worker_has_is_said_and_ends_the_load(
    cluster: Cluster, engine: Engine, fresh_database: str, tmp_path: Path
) -> None:
    with loading(cluster, fresh_database, tmp_path, "4g") as command:
        assert command.wait(120) == 1
    *_, notice, last = (tmp_path / "stderr").read_text().splitlines()
    missing = (
        f"asked for executors of 4096 MiB of memory and all cores of a worker each; the master {cluster.url} has "
        "2 workers of at most 768 MiB and 2 cores each; ask for less memory (spark.executor.memory), "
        "or start workers that have more"
    )
    assert re.search(
        rf"Spark has no executor since 1\d s, .*{re.escape(missing)}; the job ends after {BOUND} s", notice
    )
    assert re.fullmatch(rf"txbox: Spark has had no executor for 2\d s: {re.escape(missing)}", last)
    assert rows(engine, "SELECT FROM bulk_load") == []


def test_an_interrupt_while_no_executor_comes_ends_the_load_in_one_line(
    cluster: Cluster, engine: Engine, fresh_database: str, tmp_path: Path
) -> None:
    said = tmp_path / "stderr"
    with loading(cluster, fresh_database, tmp_path, "4g") as command:
        wait_until(lambda: "Spark has no executor since " in said.read_text(), "the command says so", timeout=90)
        os.killpg(command.pid, signal.SIGINT)  # as a terminal does, to Spark's JVM too
        assert command.wait(20) == 130
    _, _, after = said.read_text().partition("Spark has no executor since ")
    assert after.splitlines()[1:] == ["txbox: interrupted"]
    assert rows(engine, "SELECT FROM bulk_load") == []


def test_when_all_workers_die_no_time_is_invented_and_the_load_ends(
    cluster: Cluster, engine: Engine, fresh_database: str, tmp_path: Path
) -> None:
    """The last test of this cluster."""
    wait_in_the_merge(engine)
    with loading(cluster, fresh_database, tmp_path, "512m") as command, holding_gate(engine):
        at_the_gate(engine)
        for one in [process for host in HOSTS for process in processes_of(cluster, host)]:
            one.kill()
        assert command.wait(120) == 1
    said = (tmp_path / "stderr").read_text()
    _, noticed, after = said.partition("Spark has no executor since ")
    assert noticed, said
    assert " left" not in after
    *_, last = after.splitlines()
    run = rows(engine, "SELECT run_id FROM bulk_load")[0][0]
    dead = f"the master {cluster.url} has no worker that is alive; start one"
    assert last.startswith("txbox: Spark has had no executor for 2")
    assert f"{dead} (" in last
    assert last.endswith(f"when the cause is fixed, resume run {run})")
