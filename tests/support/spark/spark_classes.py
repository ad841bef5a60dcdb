"""Write the classes that Spark loads into an archive of the JVM's, from which the next ones start in half the time.

::

    python tests/support/spark/spark_classes.py FILE

The archive holds for this Java and this Spark. Where the Java cannot write one, the file stays empty, and JVMs start
as they always do. See "Class Data Sharing" in Java's documentation.
"""

import os
import sys
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame

from txbox_spark import spark_session

ENDS_SECONDS = 120.0
"""How long the JVM may take to write the archive when it ends."""


def look_at(batch: DataFrame, _number: int) -> None:
    """Read a batch of a stream."""
    batch.collect()


def load_classes(folder: Path) -> None:
    """Start Spark, and run what loads a good part of the classes that loads of events use; then end its JVM."""
    spark = spark_session("txbox-classes", master="local[2]", settings={"spark.sql.shuffle.partitions": "2"})
    jvm = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    numbers = spark.range(20).selectExpr("id", "string(id % 3) AS name", "current_timestamp() AS at")
    for form in ("csv", "json", "parquet"):
        place = str(folder / form)
        numbers.write.format(form).save(place)
        read = spark.read.format(form).schema(numbers.schema).load(place)
        read.groupBy("name").count().join(read, "name").orderBy("id").collect()
    numbers.rdd.mapPartitions(lambda rows: [sum(1 for _ in rows)]).collect()
    stream = spark.readStream.schema(numbers.schema).parquet(str(folder / "parquet"))
    query = stream.writeStream.foreachBatch(look_at).trigger(availableNow=True)
    query.option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination()
    spark.stop()
    jvm.stdin.close()
    jvm.wait(ENDS_SECONDS)


def main(file: Path) -> None:
    """Write the archive."""
    file.unlink(missing_ok=True)
    written = file.with_suffix(".new")
    with tempfile.TemporaryDirectory(prefix="txbox-spark-") as folder:
        places = f"-Djava.io.tmpdir={folder} -Dspark.sql.warehouse.dir={folder}/warehouse"
        options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable"
        os.environ["SPARK_SUBMIT_OPTS"] = f"{options} -XX:ArchiveClassesAtExit={written} {places}"
        load_classes(Path(folder))
    written.touch()
    written.replace(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
