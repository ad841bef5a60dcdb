"""Loads from tables of Delta Lake and Iceberg, by a Spark of its own: it gets their jars when it starts, or never."""

import json
import sys
from pathlib import Path

from support.spark.bulk_loads import APPLY, SUBSCRIBER, frame, purchases
from txbox_spark import bulk_load, read_source, spark_session

JARS = "io.delta:delta-spark_2.13:4.0.0,org.apache.iceberg:iceberg-spark-runtime-4.0_2.13:1.10.0"
EVENTS = purchases(300)
TWICE = [*EVENTS, *EVENTS[:10]]
LATER = [("later", 1, 5)]
"""Of a snapshot that is not read."""


def main(url: str, folder: Path) -> None:
    """Load a snapshot of each, and print what the loads came to."""
    settings = {
        "spark.jars.packages": JARS,
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "hadoop",
        "spark.sql.catalog.lake.warehouse": str(folder / "iceberg"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    spark = spark_session("lakes", master="local[2]", settings=settings)
    delta, iceberg = str(folder / "delta"), "lake.archive.purchases"
    for rows in (TWICE, LATER):
        frame(spark, rows).write.format("delta").mode("append").save(delta)
        written = frame(spark, rows).writeTo(iceberg)
        written.create() if rows is TWICE else written.append()
    snapshots = spark.table(f"{iceberg}.snapshots").orderBy("committed_at").collect()
    reports = {}
    for source, options in (
        (f"delta:{delta}", {"versionAsOf": "0"}),
        (f"iceberg:{iceberg}", {"snapshot-id": str(snapshots[0].snapshot_id)}),
    ):
        events, named = read_source(spark, source, options=options)
        report = bulk_load(
            events, url=url, subscriber_id=SUBSCRIBER, message_id="event_id", apply=APPLY, source=named, chunk_rows=100
        )
        reports[source.partition(":")[0]] = report.as_dict()
    sys.stdout.write(json.dumps(reports))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
