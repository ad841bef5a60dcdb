"""Lists the files that events are read from, as Spark does.

Folders with names such as ``store=007`` define columns. Spark skips the files beside such folders, although it names
them among its input. If a file has such a column, too, Spark takes the folder's value. Both are refused here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from txbox_spark.reading.errors import SourceError, explained
from txbox_spark.runtime.lazy_imports import Column, DataFrame, SparkSession, sql

CHOOSING_FILES = ("pathglobfilter", "modifiedbefore", "modifiedafter", "ignoremissingfiles", "timezone")
"""The options of Spark's readers that choose among files, in lower case."""


def listing(spark: SparkSession, paths: Sequence[str], options: Mapping[str, str] | None) -> DataFrame:
    """Return every file below the paths that Spark's readers reach, in the format ``binaryFile``.

    Raises:
        SourceError: there are no paths, or Spark cannot find them.
    """
    if isinstance(paths, str) or not paths:
        raise SourceError("give at least one path to read events from, in a list")
    choosing = {name: value for name, value in (options or {}).items() if name.lower() in CHOOSING_FILES}
    with explained(f"cannot find {described(paths)}"):
        return (
            spark.read.format("binaryFile").options(**choosing).option("recursiveFileLookup", "true").load(list(paths))
        )


def files_in(spark: SparkSession, paths: Sequence[str], options: Mapping[str, str] | None) -> list[str]:
    """Return the names of the files below the paths; raise ``SourceError`` if there are none."""
    found = listing(spark, paths, options)
    with explained(f"cannot list {described(paths)}"):
        files = found.inputFiles()
    if not files:
        raise SourceError(nothing_in(paths))
    return files


def first_bytes(spark: SparkSession, count: int) -> Callable[[str], bytes]:
    """Return a function that returns the first bytes of a file, decompressed if its name says so."""
    jvm: Any = spark._jvm  # noqa: SLF001 pyspark has no other way to open a file of Hadoop's
    hadoop: Any = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    compression = jvm.org.apache.hadoop.io.compress.CompressionCodecFactory(hadoop)

    def first(path: str) -> bytes:
        file_path = jvm.org.apache.hadoop.fs.Path(path)
        stream = file_path.getFileSystem(hadoop).open(file_path)
        try:
            codec = compression.getCodec(file_path)
            content = stream if codec is None else codec.createInputStream(stream)
            return bytes(content.readNBytes(count))
        finally:
            stream.close()

    return first


def file_of(frame: DataFrame) -> Column:
    """Return Spark's expression for the file that a row comes from, even if the files have a column ``_metadata``."""
    return frame.metadataColumn("_metadata").getField("file_path")


def refuse_overlooked(there: Sequence[str], frame: DataFrame) -> None:
    """Raise ``SourceError`` if the frame skips one of the files ``there``.

    Spark reads folders below a path only if they are named key=value, and then it reads no file beside them.
    """
    read = set(frame.inputFiles())
    overlooked = sorted(set(there) - read)
    why = "their folders are not named key=value; give the option recursiveFileLookup=true"
    if not overlooked and folder_columns(frame):
        folders = {_plain(folder) for folder in partition_folders(frame)}
        overlooked = sorted(file for file in there if _plain(unquote(file)).rpartition("/")[0] not in folders)
        why = (
            "they lie beside folders that are named key=value; read them apart, or give the option "
            "recursiveFileLookup=true, which leaves out what folders' names say"
        )
    if overlooked:
        raise SourceError(
            f"{len(overlooked)} of {len(there)} files would be passed over, such as {overlooked[0]}: {why}"
        )


def _plain(path: str) -> str:
    """Return a Hadoop path without the slashes of an empty host: file:///a and file:/a are the same."""
    return path.replace(":///", ":/", 1)


def described(paths: Sequence[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def nothing_in(paths: Sequence[str]) -> str:
    """Return the error text for paths without files."""
    return f"there are no files in {described(paths)}; names that begin with _ or . do not count"


FILES_ALONE = {"recursiveFileLookup": "true"}
"""The option with which Spark reads every file, and no column from a folder's name."""


def folder_columns(frame: DataFrame) -> list[str]:
    return list(dict.fromkeys(name for one in _relations(frame) for name in one.partitionSchema().fieldNames()))


def partition_folders(frame: DataFrame) -> set[str]:
    """Return the folders whose names define columns and that Spark reads files from, as Hadoop writes them."""
    found = set()
    for relation in _relations(frame):
        partitions = relation.location().partitionSpec().partitions().iterator()
        while partitions.hasNext():
            found.add(str(partitions.next().path().toString()))
    return found


def refuse_in_both(folders: Iterable[str], in_files: Iterable[str], where: str) -> None:
    """Raise ``SourceError`` if a folders' column is in the files, too; Spark ignores case."""
    there = {name.lower() for name in in_files}
    for name in folders:
        if name.lower() in there:
            raise SourceError(
                f"the column {name} is in the files of {where} and in the names of their folders, and Spark would "
                "take the folders'; rename one, or give the option recursiveFileLookup=true, which takes the files'"
            )


def json_keys_among(text: Column, names: Iterable[str], given: Mapping[str, str]) -> Column:
    """Return which of the names are keys of the records in a JSON text, in lower case.

    Args:
        text: a line or a document: an object, or an array of objects.
        names: the column names to look for.
        given: options of Spark's reader.
    """
    wanted = sql.array(*[sql.lit(name.lower()) for name in names])
    record, several = (sql.from_json(text, of, dict(given)) for of in (_RECORD, f"array<{_RECORD}>"))
    records = sql.when(record.isNotNull(), sql.array(record)).otherwise(several)
    keys = sql.flatten(sql.transform(records, lambda one: sql.transform(sql.map_keys(one), sql.lower)))
    return sql.array_intersect(keys, wanted)


def _relations(frame: DataFrame) -> list[Any]:
    """Return Spark's Java objects for the sets of files that a frame reads."""
    leaves: Any = frame._jdf.queryExecution().analyzed().collectLeaves()  # noqa: SLF001
    return [leaves.apply(number).relation() for number in range(leaves.size())]


_RECORD = "map<string, string>"
