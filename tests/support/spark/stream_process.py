"""A service with a streaming query, in a process of its own: what it logs and prints is what its user sees.

A line of JSON on stdin is what it is to do, a line of JSON on stdout says that it is done.
"""

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.processes import start_python
from txbox_spark import inbox_sink, spark_session

# A row that never ends, for a batch that is stopped in its survey.
SLEEPING = "if(purchase_id = 'p002499', reflect('java.lang.Thread', 'sleep', 3600000L), '') IS NOT NULL"
SCHEMA = "purchase_id string, account_id int, amount bigint"


class StreamProcess:
    """The process, seen from the test."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        with errors.open("w") as stderr:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
            self._process = start_python("-m", "support.spark.stream_process", text=True, **pipes)

    def begin(self, what: str, **settings: Any) -> None:
        """Have it do something, and return at once."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps({'do': what, **settings})}\n")
        self._process.stdin.flush()

    def answer(self) -> object:
        """What came of it. A line that is no answer is an error."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def do(self, what: str, **settings: Any) -> object:
        """Have it do something, and wait until it is done."""
        self.begin(what, **settings)
        return self.answer()

    def said(self) -> str:
        """All that is on its stderr."""
        return self._errors.read_text()

    def end(self) -> int:
        """Have it end; its status."""
        self._process.communicate(timeout=60)
        return self._process.returncode


def main() -> None:
    """Do what is asked for."""
    logging.basicConfig()
    spark = spark_session("txbox-stream", master="local[2]", settings={"spark.sql.shuffle.partitions": "2"})
    query: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        match asked.pop("do"):
            case "start":
                frame = spark.readStream.schema(SCHEMA).parquet(asked.pop("landing"))
                frame = frame.where(SLEEPING) if asked.pop("sleeping", False) else frame
                checkpoint = asked.pop("checkpoint")
                sink = inbox_sink(message_id="purchase_id", chunk_rows=500, parallelism=2, **asked)
                query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", checkpoint).start()
            case "wait for a task":
                tracker = spark.sparkContext.statusTracker()
                while not any(map(tracker.getStageInfo, tracker.getActiveStageIds())):
                    time.sleep(0.1)
            case "stop":
                query.stop()
            case "finish":
                query.processAllAvailable()
                query.stop()
        failed = query.exception()
        sys.stdout.write(f"{json.dumps(failed and str(failed))}\n")
        sys.stdout.flush()
    spark.stop()


if __name__ == "__main__":
    main()
