"""Format txbox as the sink of a declarative pipeline: killed, run again over a new file, and refreshed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Engine

from support.spark.bulk_loads import APPLY, COLUMNS, SUBSCRIBER, Books, Purchase, as_dicts, purchases
from support.spark.event_files import drop
from support.waiting import wait_until

pytest.importorskip("pyspark.pipelines", reason="declarative pipelines need Spark 4.1")
pytest.importorskip("grpc_status", reason="declarative pipelines need pyspark[pipelines]")
pytest.importorskip("yaml", reason="declarative pipelines need pyspark[pipelines]")

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

PROGRAM = Path(sys.executable).with_name("spark-pipelines")
RUN_SECONDS = 120
GATE = 4713
"""The advisory lock that the batch with ``purchases[70]`` waits for in its apply."""

DEFINITIONS = f"""
import os
from pathlib import Path
from pyspark import pipelines as dp

dp.create_sink(
    name="billing_inbox",
    format="txbox",
    options={{
        "url": os.environ["TXBOX_DATABASE_URL"],
        "subscriber": {SUBSCRIBER!r},
        "message_id": "event_id",
        "apply": Path("apply.sql").read_text(),
    }},
)

@dp.append_flow(target="billing_inbox")
def purchases():
    stream = spark.readStream.schema({COLUMNS!r}).option("maxFilesPerTrigger", 1)
    return stream.json(str(Path("landing").resolve()))
"""


class Pipeline:
    """A pipeline's folder, and its runs as processes."""

    def __init__(self, url: str, folder: Path) -> None:
        self._folder = folder
        paths = os.pathsep.join(path for path in sys.path if path)
        self._env = {
            **os.environ,
            "PYTHONPATH": paths,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONDONTWRITEBYTECODE": "1",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "TXBOX_DATABASE_URL": url,
        }
        for name in ("transformations", "landing", "elsewhere"):
            (folder / name).mkdir()
        (folder / "transformations" / "purchases.py").write_text(DEFINITIONS)
        (folder / "apply.sql").write_text(
            f"{APPLY}; SELECT pg_advisory_xact_lock({GATE}) FROM fresh_event WHERE event_id = '{GATED}'"
        )
        spec = {
            "name": "purchases",
            "storage": (folder / "storage").as_uri(),
            "libraries": [{"glob": {"include": "transformations/**"}}],
        }
        (folder / "spark-pipeline.yml").write_text(json.dumps(spec))  # which YAML is, too

    def drop(self, events: list[Purchase]) -> None:
        """Put a file into the folder, whole at once."""
        drop(self._folder / "landing", as_dicts(events))

    def start(self, *options: str) -> "subprocess.Popen[str]":
        """Start a run, from another folder than the pipeline's."""
        spec = str(self._folder / "spark-pipeline.yml")
        return subprocess.Popen(
            [str(PROGRAM), "--remote", "local[2]", "--conf", "spark.ui.enabled=false", "run", "--spec", spec, *options],
            cwd=self._folder / "elsewhere",
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *options: str) -> str:
        """Run it to its end, and return what it has said."""
        process = self.start(*options)
        try:
            said, _ = process.communicate(timeout=RUN_SECONDS)
        finally:
            kill(process)
        assert process.returncode == 0, said
        assert "Run is COMPLETED" in said
        return said


def kill(process: "subprocess.Popen[str]") -> str:
    """Kill the command, its Python and both JVMs at once, and return what it has said.

    The server's Python workers are a group of their own, and end when they find their JVM gone.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    said, _ = process.communicate(timeout=20)
    wait_until(lambda: process.pid not in sessions(), "the end of the workers", timeout=30)
    return said


def sessions() -> set[int]:
    """The sessions of all processes."""
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            found.add(os.getsid(pid))
    return found


EVENTS = purchases(220)
GATED = EVENTS[70][0]


@pytest.fixture
def accounts(engine: Engine) -> Books:
    return Books(engine)


def test_a_pipeline_that_is_killed_and_run_again_applies_each_event_once(
    fresh_database: str, engine: Engine, accounts: Books, tmp_path: Path
) -> None:
    pipeline = Pipeline(fresh_database, tmp_path)
    pipeline.drop(EVENTS[:60])
    pipeline.drop([*EVENTS[40:120], *EVENTS[40:50]])
    waiting = f"SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = {GATE} AND NOT granted"
    with engine.connect() as gate:
        gate.exec_driver_sql("SELECT pg_advisory_lock(%s)", (GATE,))
        victim = pipeline.start()
        try:
            wait_until(lambda: accounts.rows(waiting) or victim.poll() is not None, "the second batch", timeout=120)
        finally:
            alive, said = victim.poll() is None, kill(victim)
        assert alive, said
        gate.exec_driver_sql("SELECT pg_advisory_unlock(%s)", (GATE,))
    wait_until(lambda: not accounts.rows(waiting), "the end of the killed transaction")
    accounts.require_applied(EVENTS[:60])

    pipeline.drop([*EVENTS[100:], (None, 1, 1)])
    said = pipeline.run()
    accounts.require_applied(EVENTS)
    assert fresh_database not in said
    runs = "SELECT rows_read, rows_rejected FROM bulk_load WHERE finished_at IS NOT NULL"
    assert accounts.rows(runs) == [(121, 1)], "the ledger has the last batch"
    processed = (
        "SELECT sum(applied)::int, sum(already_processed)::int FROM bulk_load_chunk JOIN bulk_load USING (run_id)"
    )
    assert accounts.rows(processed) == [(100, 20)]

    pipeline.run("--full-refresh-all")
    accounts.require_applied(EVENTS)
    assert accounts.rows(processed) == [(0, 120)], "everything was read again"
