"""The headers of CSV files: their names, and which files have their columns in another order.

Spark takes the columns from one of the files, and fails in the middle of a load at a file with another header. So the
first line of every file is compared here, and Spark parses each one that is different.
"""

import codecs
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from txbox_spark.reading.errors import SourceError
from txbox_spark.runtime.lazy_imports import DataFrame, SparkSession, StructType, spark_errors, sql, types


@dataclass(frozen=True, slots=True)
class Header:
    """A header, and the files that have it.

    Attributes:
        names: of the columns; one without a name is ``_c`` and its place, as Spark calls it.
        unnamed: what Spark reads where a name is missing, by the column's place.
        files: by their ``_metadata.file_path``; none: all files have this header.
        shown: one of the files.
    """

    names: tuple[str, ...]
    unnamed: Mapping[int, str]
    files: tuple[str, ...]
    shown: str

    def ordered(self, columns: StructType, folders: Collection[str], of: str) -> StructType:
        """Return the columns in the order of this header, and those of folders behind them.

        Args:
            columns: of all files.
            folders: the columns that come from names of folders.
            of: what they are the columns of, in words.

        Raises:
            SourceError: the header lacks one of them, has another one, or has one twice.
        """
        self._refuse_repeated()
        apart = {name.lower() for name in folders}
        wanted = {field.name.lower(): field for field in columns.fields}
        there = {name.lower() for name in self.names}
        missing = [field.name for key, field in wanted.items() if key not in there | apart]
        more = [name for name in self.names if name.lower() not in wanted]
        if missing or more:
            does = f"has no column {', '.join(missing)}, which {of} has" if missing else ""
            has = f"has the column {', '.join(more)}, which {of} does not have" if more else ""
            raise SourceError(
                f"{self.shown} {' and '.join(filter(None, (does, has)))}: its header is {','.join(self.names)}; name "
                "all columns, or read files with different columns apart"
            )
        rest = [field for key, field in wanted.items() if key not in there]
        return types.StructType([*[wanted[name.lower()] for name in self.names], *rest])

    def _refuse_repeated(self) -> None:
        if len(set(self.unnamed.values())) < len(self.unnamed):
            raise SourceError(f"{self.shown} has two columns without a name; name them, or leave them out")
        first_places: dict[str, int] = {}
        for place, name in enumerate(self.names):
            if (first := first_places.setdefault(name.lower(), place)) != place:
                both = " and ".join(dict.fromkeys((self.names[first], name)))
                raise SourceError(f"{self.shown} has two columns named {both}; rename one")

    def read(self, load: Callable[[StructType], DataFrame], columns: StructType) -> DataFrame:
        """Read the files that have it. ``columns`` begin with those of the header, in their order."""
        renamed = {token: columns.names[place] for place, token in self.unnamed.items()}
        fields = [
            types.StructField(self.unnamed.get(place, field.name), field.dataType)
            for place, field in enumerate(columns.fields)
        ]
        frame = load(types.StructType(fields))
        if self.files:
            # Of the others, Spark does not even open a file.
            frame = frame.where(sql.col(_FILE).isin(list(self.files)))
        return frame.toDF(*[renamed.get(name, name) for name in frame.columns]) if renamed else frame


def files_by_first_line(spark: SparkSession, files: DataFrame) -> list[list[tuple[str, str]]]:
    """Return the files by their first lines, each file by its path and its ``_metadata.file_path``.

    ``files`` are as Spark lists them in the format ``binaryFile``. Empty files, and those that cannot be opened, have
    no line of their own: they are among the first ones.
    """
    found = sorted((str(path), str(file)) for path, file in files.select("path", _FILE).collect())
    if len(found) < 2:
        return [found]
    with ThreadPoolExecutor(_THREADS) as pool:
        lines = list(pool.map(_first_line(spark), [path for path, _ in found]))
    groups: dict[bytes, list[tuple[str, str]]] = {line: [] for line in lines if line} or {b"": []}
    first = next(iter(groups))
    for line, file in zip(lines, found, strict=True):
        groups[line or first].append(file)
    return list(groups.values())


def _first_line(spark: SparkSession) -> Callable[[str], bytes]:
    jvm: Any = spark._jvm  # noqa: SLF001 pyspark has no other way to open a file of Hadoop's
    hadoop: Any = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    compression = jvm.org.apache.hadoop.io.compress.CompressionCodecFactory(hadoop)

    def first_line(path: str) -> bytes:
        try:
            file_path = jvm.org.apache.hadoop.fs.Path(path)
            stream = file_path.getFileSystem(hadoop).open(file_path)
            try:
                codec = compression.getCodec(file_path)
                content = stream if codec is None else codec.createInputStream(stream)
                begin = bytes(content.readNBytes(_FIRST_BYTES))
            finally:
                stream.close()
        except spark_errors():  # Spark tells of it, or passes over it, where it reads the file
            return b""
        return re.split(rb"[\r\n]", begin.removeprefix(codecs.BOM_UTF8), maxsplit=1)[0]

    return first_line


def as_pattern(path: str) -> str:
    """Return a path as Hadoop's patterns of paths write it."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


_FILE = "_metadata.file_path"
_FIRST_BYTES = 16_384
"""What is read of a file to tell its first line from others'."""
_THREADS = 16
