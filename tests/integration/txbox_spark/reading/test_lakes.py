"""Tables of Delta Lake and Iceberg are loaded, with the Spark that their jars are made for."""

import json
import subprocess
from pathlib import Path

import pyspark
import pytest

from support.processes import start_python
from support.spark.bulk_loads import Books
from support.spark.lakes import EVENTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not pyspark.__version__.startswith("4.0."),
        reason="their jars here are made for Spark 4.0, which make test-oldest has",
    ),
]


@pytest.mark.timeout(400)  # it starts a JVM, which fetches jars the first time
def test_a_snapshot_of_each_is_loaded_once(books: Books, schema_url: str, tmp_path: Path) -> None:
    process = start_python(
        *("-m", "support.spark.lakes", schema_url, str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    reports = json.loads(out.splitlines()[-1])
    counts = ("read", "rejected", "duplicate_in_source", "already_processed", "applied", "chunks")
    assert [reports["delta"][name] for name in counts] == [310, 0, 10, 0, 300, 4]
    assert [reports["iceberg"][name] for name in counts] == [310, 0, 10, 300, 0, 4]
    assert reports["delta"]["source"] == f"delta:{tmp_path}/delta"
    assert reports["iceberg"]["source"] == "iceberg:lake.archive.purchases"
    books.require_applied(EVENTS)
