"""Format txbox over Spark Connect, from a process without a JVM; and what needs a Spark in its own process."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession

from support.spark.bulk_loads import APPLY, COLUMNS, SUBSCRIBER, Books, purchases

pytest.importorskip("grpc", reason="Spark Connect needs pyspark[connect]")
pytest.importorskip("grpc_status", reason="Spark Connect needs pyspark[connect]")

PROGRAM = f"""
import json, sys
from pyspark.sql import SparkSession
from support.spark.bulk_loads import purchases
from txbox import InvalidConfiguration
from txbox_spark import bulk_load, inbox_sink, reconcile

server, url, apply = sys.argv[1:]
spark = SparkSession.builder.remote(server).getOrCreate()
events = spark.createDataFrame(purchases(100), {COLUMNS!r})
given = dict(subscriber={SUBSCRIBER!r}, message_id="event_id", apply=apply)
events.write.format("txbox").mode("append").option("url", url).options(**given).save()
read = spark.read.format("txbox").options(url=url, table="inbox").load().count()
given = dict(url=url, subscriber_id={SUBSCRIBER!r}, message_id="event_id")

def refusal(call):
    try:
        call()
    except InvalidConfiguration as error:
        return str(error)

print(json.dumps([
    read,
    refusal(lambda: bulk_load(events, apply=apply, **given)),
    refusal(lambda: inbox_sink(apply=apply, **given)(events, 0)),
    refusal(lambda: reconcile(events, **given)),
]))
spark.stop()
"""


@pytest.fixture
def server(spark: SparkSession) -> Iterator[str]:
    """Where Spark Connect answers, of the Spark that all tests have."""
    package: Any = spark._jvm.org.apache.spark.sql.connect.service  # type: ignore[union-attr]
    service = getattr(getattr(package, "SparkConnectService$"), "MODULE$")
    context: Any = spark.sparkContext._jsc.sc()  # type: ignore[attr-defined]
    context.conf().set("spark.connect.grpc.binding.address", "127.0.0.1")
    context.conf().set("spark.connect.grpc.binding.port", "0")
    service.start(context)
    yield f"sc://127.0.0.1:{service.localPort()}"
    service.stop(*(getattr(service, f"stop$default${number}")() for number in (1, 2)))


def test_a_frame_of_spark_connect_is_written_and_the_inbox_is_read(server: str, schema_url: str, books: Books) -> None:
    paths = [path for path in sys.path if path]
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}\n{PROGRAM}", server, schema_url, APPLY],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    books.require_applied(purchases(100))
    read, loaded, sunk, reconciled = json.loads(ended.stdout.splitlines()[-1])
    assert read == 100
    refused = "needs a Spark in this process; over Spark Connect,"
    assert f'bulk_load {refused} write it with format txbox: events.write.format("txbox")' in loaded
    assert f"inbox_sink {refused} write the stream with format txbox" in sunk
    assert f"reconcile {refused} join the archive" in reconciled
