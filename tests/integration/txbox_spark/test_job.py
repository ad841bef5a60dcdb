"""The door for spark-submit: the same job, with the same arguments and the same errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from sqlalchemy import Engine

from support.program import Ended

SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
JOB = Path(__file__).parents[3] / "spark" / "txbox_spark" / "job.py"


def submit(*arguments: str, url: str = "") -> Ended:
    ended = subprocess.run(
        [str(SUBMIT), "--master", "local[1]", str(JOB), *arguments],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "TXBOX_DATABASE_URL": url},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.slow  # it starts a Spark of its own; CI runs it with the oldest one
def test_spark_submit_runs_the_same_job(engine: Engine, schema_url: str, tmp_path: Path) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE effect (event_id text, cents int)")
    events, effect = tmp_path / "events.jsonl", tmp_path / "effect.sql"
    events.write_text('{"event_id":"a","cents":1}\n{"event_id":"b","cents":2}\n{"event_id":"a","cents":1}\n')
    effect.write_text("INSERT INTO effect SELECT event_id, cents FROM fresh_event")
    arguments = ("--subscriber", "billing", "--message-id", "event_id", "--apply", str(effect), "--json")
    ended = submit(str(events), *arguments, "--fields", "event_id string, cents int", url=schema_url)
    assert ended.status == 0, ended.err
    report = json.loads(ended.out[ended.out.index("{") :])
    assert (report["read"], report["duplicate_in_source"], report["applied"], report["writer"]) == (3, 1, 2, "copy")
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT event_id, cents FROM effect ORDER BY event_id").fetchall()
    assert [tuple(row) for row in rows] == [("a", 1), ("b", 2)]


def test_its_errors_are_the_programs(tmp_path: Path) -> None:
    """Without spark-submit, which takes seconds to hand them on."""
    arguments = (str(tmp_path / "none.jsonl"), "--subscriber", "billing", "--message-id", "event_id")
    ended = subprocess.run(
        [sys.executable, str(JOB), *arguments],
        env={**os.environ, "TXBOX_DATABASE_URL": "postgresql://127.0.0.1/none"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = "txbox: name the effect: --apply FILE.sql, --call MODULE:NAME, or --upsert-into TABLE\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", said)
