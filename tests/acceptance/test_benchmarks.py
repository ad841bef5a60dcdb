"""The benchmarks run to their ends and write their figures; how good they are depends on the machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

RECORD = ("--rounds", "1", "--seconds", "1", "--only", "record")
LEDGER = ("--rounds", "1", "--seconds", "1", "--connections", "1", "--only", "pgbench|PostgresLedger|DynamoDB")
LEDGER_KEYS = {"pgbench conditional UPDATE, 1c", "pgbench our statements, 1c", "PostgresLedger, 1c"}
LEDGER_KEYS |= {"DynamoDBLedger, 1c"}
RELAY = (
    *("--quick", "--backlog", "2000", "--messages", "4000", "--window", "1000"),
    *("--only", "publish pgbench(?! with| into).*, 1c|drain .*x1|health, (slowdown|table)"),
)
RELAY_KEYS = {"publish pgbench business only, 1c", "publish pgbench, 1c", "drain by plain deletes x1", "drain relay x1"}
RELAY_KEYS |= {"drain relay keyed x1", "health, slowdown", "health, table"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "arguments", "keys"),
    [
        pytest.param("consumer.py", RECORD, {"Inbox.record(connection)", "Inbox.record(session)"}, id="consumer"),
        pytest.param("relay.py", RELAY, RELAY_KEYS, id="relay"),
        pytest.param("ledger.py", LEDGER, LEDGER_KEYS, id="ledger"),
    ],
)
def test_a_benchmark_runs_and_writes_its_figures(
    program: str, arguments: tuple[str, ...], keys: set[str], tmp_path: Path
) -> None:
    figures_file = tmp_path / "figures.json"
    ended = subprocess.run(
        [sys.executable, BENCHMARKS / program, *arguments, "--json", figures_file],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    document = json.loads(figures_file.read_text())
    figures = document["figures"]
    assert set(figures) == keys
    for key, figure in figures.items():
        assert figure["unit"]
        assert [sample["value"] > 0 for sample in figure["samples"]] == [True]
        assert figure["spread"]["median"] == figure["samples"][0]["value"]
        assert key in ended.stdout
    assert {target["key"] for target in document["targets"]} <= set(figures)
    assert document["server"]["version"]
