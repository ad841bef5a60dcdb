"""Columns that come from the names of folders, such as ``store`` of ``store=007``, and the files that they hide.

Where folders are named so, Spark passes over the files that lie beside them, although it names them among its input.
Where a file has such a column too, Spark takes what the folder says. Both are refused.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from txbox_spark.reading.errors import SourceError
from txbox_spark.runtime.lazy_imports import Column, DataFrame, sql

FILES_ALONE = {"recursiveFileLookup": "true"}
"""The option by which Spark reads every file, and no column from a folder's name."""


def folder_columns(frame: DataFrame) -> list[str]:
    """Return the columns of a frame that come from the names of folders."""
    return list(dict.fromkeys(name for one in _relations(frame) for name in one.partitionSchema().fieldNames()))


def partition_folders(frame: DataFrame) -> set[str]:
    """Return the folders that Spark reads files from, as Hadoop writes them, if their names give columns."""
    found = set()
    for relation in _relations(frame):
        partitions = relation.location().partitionSpec().partitions().iterator()
        while partitions.hasNext():
            found.add(str(partitions.next().path().toString()))
    return found


def refuse_in_both(folders: Iterable[str], in_files: Iterable[str], where: str) -> None:
    """Raise ``SourceError`` if a column of folders is one of the files, too; Spark ignores case."""
    there = {name.lower() for name in in_files}
    for name in folders:
        if name.lower() in there:
            raise SourceError(
                f"the column {name} is in the files of {where} and in the names of their folders, and Spark would "
                "take the folders'; rename one, or give the option recursiveFileLookup=true, which takes the files'"
            )


def json_keys_among(text: Column, names: Iterable[str], given: Mapping[str, str]) -> Column:
    """Return which of the names are keys of the records in a JSON text, in small letters.

    Args:
        text: a line, or a document: an object, or an array of them.
        names: of columns.
        given: options of Spark's reader.
    """
    wanted = sql.array(*[sql.lit(name.lower()) for name in names])
    record, several = (sql.from_json(text, of, dict(given)) for of in (_RECORD, f"array<{_RECORD}>"))
    records = sql.when(record.isNotNull(), sql.array(record)).otherwise(several)
    keys = sql.flatten(sql.transform(records, lambda one: sql.transform(sql.map_keys(one), sql.lower)))
    return sql.array_intersect(keys, wanted)


def _relations(frame: DataFrame) -> list[Any]:
    """Return Java's descriptions of the sets of files that a frame reads."""
    leaves: Any = frame._jdf.queryExecution().analyzed().collectLeaves()  # noqa: SLF001
    return [leaves.apply(number).relation() for number in range(leaves.size())]


_RECORD = "map<string, string>"
