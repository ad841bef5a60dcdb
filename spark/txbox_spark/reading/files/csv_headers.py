"""The headers of CSV files: their names, and which files have their columns in another order.

Spark takes the columns from one of the files, and fails in the middle of a load at a file with another header. So the
bytes of every file's header are compared here, and Spark parses each one that is different.
"""

import codecs
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from txbox_spark.reading.columns import CORRUPT_RECORD
from txbox_spark.reading.errors import SourceError
from txbox_spark.reading.files.file_listing import file_of
from txbox_spark.runtime.lazy_imports import DataFrame, SparkSession, StructType, spark_errors, types


@dataclass(frozen=True, slots=True)
class Header:
    """A header, and the files that have it.

    Attributes:
        names: of the columns; one without a name is ``_c`` and its place, as Spark calls it.
        unnamed: what Spark reads where a name is missing, by the column's place.
        files: by what ``file_of`` says; none: all files have this header.
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
        self._refuse_names()
        apart = {name.lower() for name in folders}
        wanted = {field.name.lower(): field for field in columns.fields}
        there = {name.lower() for name in self.names}
        missing = [field.name for key, field in wanted.items() if key not in there | apart]
        more = [name for name in self.names if name.lower() not in wanted]
        if missing or more:
            does = f"has no column {_listed(missing)}, which {of} has" if missing else ""
            has = f"has the column {_listed(more)}, which {of} does not have" if more else ""
            raise SourceError(
                f"{self.shown} {' and '.join(filter(None, (does, has)))}: its header is {','.join(self.names)}; name "
                "all columns, or read files with different columns apart"
            )
        rest = [field for key, field in wanted.items() if key not in there]
        return types.StructType([*[wanted[name.lower()] for name in self.names], *rest])

    def _refuse_names(self) -> None:
        if CORRUPT_RECORD in (name.lower() for name in self.names):
            raise SourceError(
                f"{self.shown} has a column {CORRUPT_RECORD}, which is the name of what malformed records are kept in; "
                "rename it"
            )
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
            frame = frame.where(file_of(frame).isin(list(self.files)))
        return frame.toDF(*[renamed.get(name, name) for name in frame.columns]) if renamed else frame


def _listed(names: Iterable[str]) -> str:
    return ", ".join(
        f"{name} (so Spark calls a column without a name)" if _UNNAMED.fullmatch(name) else name for name in names
    )


def files_by_header(
    spark: SparkSession, files: DataFrame, *, comment: bytes, quote: bytes
) -> dict[bytes, list[tuple[str, str]]]:
    """Return the files by the bytes of their headers, each file by its path and what ``file_of`` says.

    Empty files, and those that cannot be opened, have none: they are the last ones of the first header. Without any
    header, and for a single file, which is not opened, the key is empty.

    Args:
        spark: the session.
        files: as Spark lists them in the format ``binaryFile``.
        comment: what lines begin with that are passed over; empty: none are.
        quote: what encloses a name that may hold a line break; empty: nothing does.
    """
    found = sorted((str(path), str(file)) for path, file in files.select("path", file_of(files)).collect())
    if len(found) < 2:
        return {b"": found}
    passed_over = rb"[\0- ]*[\r\n]" + (rb"|%b[^\r\n]*" % re.escape(comment) if comment else b"")
    quoted_name = rb"%b[^%b]*%b|" % ((re.escape(quote),) * 3) if quote else b""
    header = re.compile(rb"(?:%b)*((?:%b[^\r\n])*)" % (passed_over, quoted_name))
    with ThreadPoolExecutor(_THREADS) as pool:
        begins = list(pool.map(_begin(spark), [path for path, _ in found]))
    groups: dict[bytes, list[tuple[str, str]]] = {}
    without: list[tuple[str, str]] = []
    for begin, file in zip(begins, found, strict=True):
        line = cast("re.Match[bytes]", header.match(begin))[1]
        (groups.setdefault(line, []) if line else without).append(file)
    groups.setdefault(next(iter(groups), b""), []).extend(without)
    return groups


def _begin(spark: SparkSession) -> Callable[[str], bytes]:
    jvm: Any = spark._jvm  # noqa: SLF001 pyspark has no other way to open a file of Hadoop's
    hadoop: Any = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    compression = jvm.org.apache.hadoop.io.compress.CompressionCodecFactory(hadoop)

    def begin(path: str) -> bytes:
        try:
            file_path = jvm.org.apache.hadoop.fs.Path(path)
            stream = file_path.getFileSystem(hadoop).open(file_path)
            try:
                codec = compression.getCodec(file_path)
                content = stream if codec is None else codec.createInputStream(stream)
                return bytes(content.readNBytes(_FIRST_BYTES)).removeprefix(codecs.BOM_UTF8)
            finally:
                stream.close()
        except spark_errors():  # Spark tells of it, or passes over it, where it reads the file
            return b""

    return begin


def as_pattern(path: str) -> str:
    """Return a path as Hadoop's patterns of paths write it."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


_UNNAMED = re.compile("_c[0-9]+")
_FIRST_BYTES = 16_384
"""What is read of a file to tell its header from others'."""
_THREADS = 16
