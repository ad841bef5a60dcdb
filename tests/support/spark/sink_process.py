"""A streaming query in a process of its own, which tests may kill. Run it with its settings as JSON in one argument.

It loads files of JSON lines, one file a batch, through the inbox's sink, until no file is left. Each batch's report is
a line on its standard output.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.processes import start_python
from support.spark.bulk_loads import APPLY, COLUMNS
from txbox_spark import BulkLoadReport, spark_session
from txbox_spark.sink import inbox_sink

GATE = 4712
"""The advisory lock that a batch waits for in its apply which has an event named ``gate``."""
GATED = f"{APPLY}; SELECT pg_advisory_xact_lock({GATE}) FROM fresh_event WHERE event_id = 'gate'"


def start(**settings: Any) -> "subprocess.Popen[str]":
    """Start the process, in a process group of its own: with its JVM, and that one's Python workers.

    Args:
        settings: ``url`` of the database, ``landing`` and ``checkpoint`` folders, and what goes to the sink.
    """
    arguments = ("-m", "support.spark.sink_process", json.dumps(settings))
    return start_python(*arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)


def main() -> None:
    """Load what there is."""
    settings = json.loads(sys.argv[1])
    landing, checkpoint = settings.pop("landing"), settings.pop("checkpoint")
    spark = spark_session("txbox-sink", master="local[2]", settings={"spark.sql.shuffle.partitions": "2"})

    def told(batch: int, report: BulkLoadReport) -> None:
        line = {"batch": batch, **report.as_dict()}
        sys.stdout.write(f"{json.dumps(line)}\n")
        sys.stdout.flush()

    sink = inbox_sink(subscriber_id="billing", message_id="event_id", apply=GATED, on_batch=told, **settings)
    stream = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).json(str(Path(landing)))
    query = stream.writeStream.foreachBatch(sink).option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
