"""A load of a few rows from the command line, against Spark's start alone: each in a process of its own."""

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from benchmarks.shared.database import SCHEMA, SUBSCRIBER, Database
from benchmarks.shared.measurements import Sample, WrongResult

ROWS = 100
START = "Spark's start alone"
LOAD = f"txbox bulk-load, {ROWS} rows"
BEYOND = "the load beyond Spark's start"

START_ALONE = """
from txbox_spark import spark_session

spark = spark_session("txbox benchmark")
spark.range(1).collect()
spark.stop()
"""


def tiny_load(folder: Path, database: Database, apply: str) -> Mapping[str, Sample]:
    """Start and stop Spark, then load a file; return how long each took, and by how much the load took longer.

    Args:
        folder: for the file.
        database: to load into.
        apply: the effect, which adds ``cents`` to the accounts.

    Raises:
        WrongResult: the events were not applied once.
    """
    events = [{"event_id": str(uuid.uuid4()), "account_id": number, "cents": number} for number in range(1, ROWS + 1)]
    file, effect = folder / "events.jsonl", folder / "apply.sql"
    file.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    effect.write_text(apply)
    database.reset(others=("bulk_load", "bulk_load_chunk"))
    start = _seconds("-c", START_ALONE)
    named = ("--subscriber", SUBSCRIBER, "--message-id", "event_id", "--apply", str(effect))
    load = _seconds("-m", "txbox_cli", "bulk-load", str(file), *named, "--url", database.url, "--schema", SCHEMA)
    found = database.number(f"SELECT sum(balance) FROM {SCHEMA}.account"), database.recorded()
    if found != (expected := (sum(range(1, ROWS + 1)), ROWS)):
        raise WrongResult(f"{LOAD}: the balances and the ids in the inbox come to {found}, not to {expected}")
    return {START: Sample(start), LOAD: Sample(load), BEYOND: Sample(load - start)}


def _seconds(*arguments: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - began
