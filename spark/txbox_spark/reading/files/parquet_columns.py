"""Reads Parquet columns that Spark cannot read by itself: times in nanoseconds, and integers of several widths.

pandas writes times in nanoseconds, and each file's integer columns with their own width. If all times are whole
microseconds, they are read as numbers and converted here. The widest integer type holds the numbers of every file.
"""

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from txbox_spark.reading.columns import quoted
from txbox_spark.reading.errors import SourceError
from txbox_spark.runtime.lazy_imports import DataFrame, SparkSession, StructType, sql, types

NANOSECONDS_AS_NUMBERS = {"spark.sql.legacy.parquet.nanosAsLong": "true"}
"""The setting with which Spark accepts columns in nanoseconds."""


def widest(schemas: Iterable[StructType]) -> StructType | None:
    """Return the columns of all files, integers with the widest type; None if other types differ."""
    found: dict[str, Any] = {}
    for field in (field for schema in schemas for field in schema.fields):
        before = found.setdefault(field.name.lower(), field)
        if before.dataType == field.dataType:
            continue
        width, other = (_WIDTHS.get(one.dataType.typeName(), 0) for one in (before, field))
        if not (width and other):
            return None
        if other > width:
            found[field.name.lower()] = types.StructField(before.name, field.dataType)
    return types.StructType(list(found.values()))


def nanosecond_columns(spark: SparkSession, paths: Iterable[str]) -> dict[str, bool]:
    """Return the columns in nanoseconds in the files, in lower case, and whether they are in UTC.

    Raises:
        SourceError: a column has another type in another file, or the times are nested within another column.
    """
    jvm: Any = spark._jvm  # noqa: SLF001 pyspark has no other way to a file's own types
    hadoop: Any = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001

    def schema(path: str) -> str:
        file = jvm.org.apache.parquet.hadoop.util.HadoopInputFile.fromPath(jvm.org.apache.hadoop.fs.Path(path), hadoop)
        reader = jvm.org.apache.parquet.hadoop.ParquetFileReader.open(file)
        try:
            return str(reader.getFileMetaData().getSchema().toString())
        finally:
            reader.close()

    kinds: dict[str, str] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for text in pool.map(schema, paths):
            column = ""
            for line in text.splitlines():
                if (field := _FIELD.search(line)) is not None:
                    column = field[2]
                    kind = "" if field[3] is None else field[3]
                    if kinds.setdefault(column.lower(), kind) != kind:
                        raise SourceError(
                            f"column {column} is a time of nanoseconds in one file, and another type in another one; "
                            "read the files apart"
                        )
                elif _NANOSECONDS in line:
                    raise SourceError(f"column {column} holds times of nanoseconds within; {_REMEDY}")
    return {column: kind == "true" for column, kind in kinds.items() if kind}


def with_times(frame: DataFrame, nanoseconds: Mapping[str, bool]) -> DataFrame:
    """Return the frame with numbers of nanoseconds converted to times.

    Args:
        frame: the events.
        nanoseconds: the columns, in lower case, and whether they are in UTC.

    Raises:
        SourceError: a time is not a whole number of microseconds.
    """
    names = [name for name in frame.columns if name.lower() in nanoseconds]
    finer = [sql.bool_or(sql.col(quoted(name)) % 1000 != 0) for name in names]
    for name, is_finer in zip(names, frame.select(finer).head() or (), strict=True):
        if is_finer:
            raise SourceError(
                f"column {name} has a time with nanoseconds, which no timestamp of Postgres holds; {_REMEDY}"
            )
    epoch = sql.lit("1970-01-01 00:00:00").cast("timestamp_ntz")
    values = []
    for name in frame.columns:
        value = sql.col(quoted(name))
        if name in names:
            micros = sql.expr(f"{quoted(name)} div 1000")
            in_utc = nanoseconds[name.lower()]
            value = sql.timestamp_micros(micros) if in_utc else sql.timestamp_add("MICROSECOND", micros, epoch)
        values.append(value.alias(name))
    return frame.select(values)


_REMEDY = "write the files with microseconds, in pandas to_parquet(…, coerce_timestamps='us')"
_NANOSECONDS = "TIMESTAMP(NANOS"
_FIELD = re.compile(
    r"^  (?! )\w+ (\S+) (.+?)"
    r"(?: \((?:TIMESTAMP\(NANOS,(true|false)\)|[A-Z_0-9]+(?:\([^()]*\))?)\))?(?: = \d+)?(?:;| \{)$"
)
"""A top-level column in Parquet's notation: ``  optional int64 at (TIMESTAMP(NANOS,false));``."""
_WIDTHS = {"byte": 1, "short": 2, "integer": 4, "long": 8}
_THREADS = 16
