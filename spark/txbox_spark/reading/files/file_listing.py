"""The files that events are read from, as Spark lists them."""

from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from txbox_spark.reading.errors import SourceError, explained
from txbox_spark.reading.files.folder_columns import folder_columns, partition_folders
from txbox_spark.runtime.lazy_imports import Column, DataFrame, SparkSession

CHOOSING_FILES = ("pathglobfilter", "modifiedbefore", "modifiedafter", "ignoremissingfiles", "timezone")
"""The options of Spark's readers that choose among files, in small letters."""


def listing(spark: SparkSession, paths: Sequence[str], options: Mapping[str, str] | None) -> DataFrame:
    """Return every file below the paths that Spark's readers reach, without its content; raises ``SourceError``."""
    if isinstance(paths, str) or not paths:
        raise SourceError("give at least one path to read events from, in a list")
    choosing = {name: value for name, value in (options or {}).items() if name.lower() in CHOOSING_FILES}
    with explained(f"cannot find {described(paths)}"):
        return (
            spark.read.format("binaryFile").options(**choosing).option("recursiveFileLookup", "true").load(list(paths))
        )


def files_in(spark: SparkSession, paths: Sequence[str], options: Mapping[str, str] | None) -> list[str]:
    """Return the names of the files below the paths; raises ``SourceError`` if there are none."""
    found = listing(spark, paths, options)
    with explained(f"cannot list {described(paths)}"):
        files = found.inputFiles()
    if not files:
        raise SourceError(nothing_in(paths))
    return files


def file_of(frame: DataFrame) -> Column:
    """Return Spark's expression for the file that a row is from; the files may have a column ``_metadata``, too."""
    return frame.metadataColumn("_metadata").getField("file_path")


def refuse_overlooked(there: Sequence[str], frame: DataFrame) -> None:
    """Raise ``SourceError`` if a frame passes over one of the files that are there.

    Spark reads folders below a path only if they are named key=value, and then no file beside them.
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
    """Return a path of Hadoop's without slashes that name no host: file:///a and file:/a are one."""
    return path.replace(":///", ":/", 1)


def described(paths: Sequence[str]) -> str:
    """Return the paths in a few words."""
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def nothing_in(paths: Sequence[str]) -> str:
    """Return, in words, that there are no files below the paths."""
    return f"there are no files in {described(paths)}; names that begin with _ or . do not count"
