"""Format txbox in a Spark of its own: found without registration, tasks that are run again, and what its log has."""

import json
import subprocess
import sys
from pathlib import Path

from sqlalchemy import make_url

from support.spark.bulk_loads import APPLY, COLUMNS, SUBSCRIBER, Books, purchases

ROWS = 25_000
PROGRAM = f"""
import json, sys
from pathlib import Path
from support.spark.bulk_loads import purchases
from txbox_spark import spark_session

url, folder, apply = sys.argv[1:]

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
inbox.count()
from pyspark_txbox import DefaultSource

class Registered(DefaultSource):
    @classmethod
    def name(cls):
        return "txbox_registered"

spark.dataSource.register(Registered)
print(json.dumps(spark.read.format("txbox_registered").options(url=url, table="inbox").load().count()), flush=True)
spark.stop()
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parents[3]), *sys.path]
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}\n{program}", *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended


def test_a_task_that_is_run_again_is_a_redelivery_and_the_password_is_in_no_plan(
    schema_url: str, books: Books, tmp_path: Path
) -> None:
    """The first attempt has committed a piece when it fails; the second one has the same rows."""
    ended = run(PROGRAM, schema_url, str(tmp_path), APPLY)
    assert (tmp_path / "failed").exists()
    books.require_applied(purchases(ROWS))
    (counts,) = books.rows(
        "SELECT run.rows_read::int, chunks, finished_at IS NOT NULL, sum(applied)::int, sum(already_processed)::int, "
        "array_agg(chunk ORDER BY chunk) FROM bulk_load AS run JOIN bulk_load_chunk USING (run_id) GROUP BY run.run_id"
    )
    assert counts[:1] + counts[2:5] == (ROWS, True, ROWS, 0)
    assert counts[5] == list(range(counts[1]))
    assert json.loads(ended.stdout.splitlines()[-1]) == ROWS
    password = make_url(schema_url).password
    assert password
    logs = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert any("AppendData" in log for log in logs)
    assert [password in text for text in (*logs, ended.stdout, ended.stderr)] == [False] * (len(logs) + 2)
