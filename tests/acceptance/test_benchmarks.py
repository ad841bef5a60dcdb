"""The benchmarks run to their ends and write their figures; how good they are depends on the machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE_WIDTH = 80

CONSUMER = ("--seconds", "1", "--connections", "4", "--batches", "10", "--only", "pgbench|set|message, 4c$")
CONSUMER_KEYS = {"pgbench message, 4c", "bare message, 4c", "worker message, 4c", "pgbench set 10, 4c"}
CONSUMER_KEYS |= {
    "bare set 10, 4c",
    "worker set 10, 4c",
    "worker set 10, 4c x2",
    "effect message, 4c",
    "effect set 10, 4c",
    "effect set 10, 4c x2",
}
COROUTINES = ("--seconds", "1", "--idle-seconds", "2")
COROUTINES_KEYS = {"what 64 waits of 20 ms allow", "AsyncWorker, they wait", "AsyncWorker, one a batch"}
COROUTINES_KEYS |= {"Worker, of the database", "AsyncWorker, of the database", "AsyncWorker, idle"}
OUTBOX_WORKER_KEYS = {"Worker over memory", "PostgresWorker", "pgbench, sets of 100", "PostgresWorker, SqlEffect"}
OUTBOX_WORKER_KEYS |= {"AsyncWorker over memory", "AsyncPostgresWorker"}
RECORD_KEYS = {"Inbox.record(connection)", "Inbox.record(session)"}
LEDGER = ("--seconds", "1", "--connections", "1", "--only", "UPDATE|PostgresLedger")
LEDGER_KEYS = {"conditional UPDATE, 1c", "PostgresLedger, 1c"}
RELAY = ("--seconds", "1", "--backlog", "2000", "--messages", "4000", "--window", "1000", "--slow-messages", "2")
RELAY_ONLY = ("--only", "update(, publish)?$|x1$|p99|slowdown$|^async|^what")
RELAY_KEYS = {"pgbench update", "pgbench update, publish", "plain deletes x1", "relay x1", "slowdown"}
RELAY_KEYS |= {"plain deletes, p99", "plain deletes, median", "relay, p99", "relay, median"}
RELAY_KEYS |= {"producers at 1,000/s, relay", "what waiting allows", "async publisher"}
TRACING_KEYS = {"no tracing", "none sampled", "10 % sampled"}
MEMORY_KEYS = {f"{form}, {when}" for form in ("effect", "batch_handler") for when in ("after 1 %", "at the end")}
DEADLOCKS_KEYS = {"message, 1 thread"}
SIZE = ("--rows", "20000,40000", "--only", "copy")
SIZE_PARTS = ("", ": processor time", ": driver's Python", ": JVM", ": Python workers", ": together")
SIZE_PARTS += (": Spark's disk", ": database")
SIZE_KEYS = {f"copy, {rows} M rows{part}" for rows in ("0.02", "0.04") for part in SIZE_PARTS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "arguments", "keys"),
    [
        pytest.param("consumer", CONSUMER, CONSUMER_KEYS, id="consumer"),
        pytest.param("coroutines", COROUTINES, COROUTINES_KEYS, id="coroutines"),
        pytest.param("outbox_worker", ("--seconds", "1"), OUTBOX_WORKER_KEYS, id="outbox_worker"),
        pytest.param("record", ("--only", "record"), RECORD_KEYS, id="record"),
        pytest.param("relay", (*RELAY, *RELAY_ONLY), RELAY_KEYS, id="relay"),
        pytest.param("ledger", LEDGER, LEDGER_KEYS, id="ledger"),
        pytest.param("tracing", ("--seconds", "1"), TRACING_KEYS, id="tracing"),
        pytest.param("memory", ("--messages", "20000"), MEMORY_KEYS, id="memory"),
        pytest.param("bulk_load_size", SIZE, SIZE_KEYS, id="bulk_load_size"),
        pytest.param("deadlocks", ("--seconds", "5", "--only", "message, 1"), DEADLOCKS_KEYS, id="deadlocks"),
    ],
)
def test_a_benchmark_runs_and_writes_its_figures(
    subject: str, arguments: tuple[str, ...], keys: set[str], tmp_path: Path
) -> None:
    figures_file = tmp_path / "figures.json"
    ended = run(subject, "--rounds", "1", *arguments, "--json", str(figures_file))
    assert ended.returncode == 0, ended.stderr
    document = json.loads(figures_file.read_text())
    assert set(document["figures"]) == keys
    for key, (sample,) in document["figures"].items():
        assert sample["value"] > 0
        assert key in ended.stdout
    assert {target["key"] for target in document["targets"]} <= keys
    assert document["server"]["version"]
    rows = [line for line in ended.stdout.splitlines() if "every figure is in" not in line]
    assert not [line for line in rows if len(line) > PAGE_WIDTH or "…" in line]
    assert document["machine"]["processor"] in (tmp_path / "figures.svg").read_text()


def test_the_plots_of_the_documentation_are_those_of_the_saved_results(tmp_path: Path) -> None:
    ended = run("figures", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    saved = sorted((ROOT / "docs" / "figures").glob("*.json"))
    assert saved
    for path in saved:
        plot = (tmp_path / f"{path.stem}.svg").read_text()
        assert plot == path.with_suffix(".svg").read_text()
        document = json.loads(path.read_text())
        assert document["machine"]["processor"] in plot
        assert document["measured_at"][:10] in plot
        assert plot.count("http") == plot.count('xmlns="http') == 1  # nothing comes from the network


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
