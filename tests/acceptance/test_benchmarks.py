"""The benchmark runs to its end and writes its figures; how good they are depends on the machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "consumer.py"


@pytest.mark.slow
def test_the_benchmark_runs_and_writes_its_figures(tmp_path: Path) -> None:
    figures_file = tmp_path / "figures.json"
    ended = subprocess.run(
        [sys.executable, PROGRAM, "--rounds", "1", "--seconds", "1", "--only", "record", "--json", figures_file],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    document = json.loads(figures_file.read_text())
    figures = document["figures"]
    assert set(figures) == {"Inbox.record(connection)", "Inbox.record(session)"}
    for key, figure in figures.items():
        assert figure["unit"]
        assert [sample["value"] > 0 for sample in figure["samples"]] == [True]
        assert figure["spread"]["median"] == figure["samples"][0]["value"]
        assert key in ended.stdout
    assert {target["key"] for target in document["targets"]} <= set(figures)
    assert document["server"]["version"]
