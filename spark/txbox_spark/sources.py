"""Events from files: Parquet, JSON lines and CSV, read so that nothing is dropped and nothing changes on the way.

Spark's readers are lenient by default. Where that would lose or alter an event, the defaults here differ:

- A line that cannot be read stays in the result, with its text in the column ``_corrupt_record``. Spark judges a line
  only by the columns that a query asks for, so the result always asks for all of them.
- A CSV file whose header is not what the columns are, in their order, fails the query; a quoted ``""`` is an empty
  text, an empty field is null; a quote within quotes is doubled (RFC 4180), as Postgres and spreadsheets write it, and
  one that is not fails the query. A field in quotes may hold line breaks.
- A decimal in CSV is digits, perhaps with a sign, a point and an exponent. What is written otherwise, such as 12,50,
  or does not fit its type to the last digit, makes the record malformed. With the option ``locale``, it is Spark that
  reads decimals, and rounds them.
- Numbers in JSON never become floating-point numbers where a decimal can hold them, and a text in quotes stays text.
- Parquet files need not all have the same columns: there are those of every file.
- The value in a folder's name, such as ``store=007``, is text, unless the schema says otherwise.
- Folders below a path that Spark would pass over are an error.
- Bytes that are not in the files' encoding make a record of CSV, or a line of JSON, malformed: see ``encodings``.

What it cannot see:

- JSON: text after the first value of a line is ignored by Spark's parser. A decimal with more digits after the point
  than the schema has is rounded, and in one that is in quotes every comma is dropped: ``"12,50"`` becomes 1250.
- CSV: where a file ends within quotes, as one that was cut off may, the last field of the last record is all that
  there is from its quote on. If lines end with CR LF, a line break within quotes becomes a single LF.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from txbox import TxboxError
from txbox_spark.columns import quoted
from txbox_spark.csv_records import as_text, decimals_of, judged
from txbox_spark.encodings import (
    LINE,
    Charset,
    EncodingError,
    all_utf8,
    charset_named,
    csv_records,
    json_columns,
    json_records,
    read_as_bytes,
    with_mark,
    with_true_names,
    without_replaced,
)
from txbox_spark.explanations import said_by_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

__all__ = ["CORRUPT_RECORD", "FORMATS", "InvalidFields", "Source", "SourceError", "read_events", "source_of"]

FORMATS = ("parquet", "json", "csv")
"""What events can be read from; json means one JSON object a line."""

CORRUPT_RECORD = "_corrupt_record"
"""The column with the text of a line that could not be read; null for all other lines."""


class SourceError(TxboxError):
    """Events cannot be read from where they should be; the message says what to do."""


class InvalidFields(SourceError):
    """The columns that a source is to have are not written as Spark takes them."""


@dataclass(frozen=True, slots=True)
class Source:
    """What events are read from.

    Attributes:
        description: for people.
        digest: SHA-256 of the names, sizes and times of the files: a resumed run must find the same.
    """

    description: str
    digest: bytes


def read_events(
    spark: "SparkSession",
    paths: Sequence[str],
    *,
    format: str | None = None,  # noqa: A002 - as Spark calls it
    schema: str | None = None,
    encoding: str | None = None,
    options: Mapping[str, str] | None = None,
) -> "DataFrame":
    """Read events from files. Those of JSON and CSV are read once here, to see whether their bytes are text.

    Args:
        spark: the session to read with.
        paths: files, folders or patterns, on anything that Spark's Hadoop can reach.
        format: one of ``FORMATS``; None goes by the files' names.
        schema: the columns as Spark DDL, such as ``event_id string, amount decimal(12,2)``. Without it the columns of
            JSON are found by reading all of it once or twice, and those of CSV are all text.
        encoding: of JSON and CSV, if it is not UTF-8, such as ``latin1`` or ``cp1252``.
        options: options of Spark's reader; they win over ours.

    Returns:
        The events; those of JSON and CSV with the column ``CORRUPT_RECORD``.

    Raises:
        SourceError: there is nothing there, or it cannot be read.
    """
    files = _files(spark, paths, options)
    chosen = _format(format, paths, files)
    if any(name.lower() == _CORRUPT_OPTION.lower() for name in options or {}):
        raise SourceError(f"option {_CORRUPT_OPTION} cannot be set: malformed lines are in {CORRUPT_RECORD}")
    columns = None if schema is None else _columns(schema)
    with explained(f"cannot read {_described(paths)} as {chosen}"):
        if chosen == "parquet":
            if encoding is not None:
                raise SourceError("an encoding is for CSV and JSON: texts in Parquet are UTF-8")
            frame = _load(spark, chosen, paths, {**_DEFAULTS[chosen], **(options or {})}, columns)
            _refuse_overlooked(files, frame.inputFiles())
            return frame
        if encoding is None:
            encoding = _option(options or {}, *_ENCODING_OPTIONS)
        charset = charset_named(spark, "UTF-8" if encoding is None else encoding)
        theirs = {name: value for name, value in (options or {}).items() if name.lower() not in _ENCODING_OPTIONS}
        read = _read_csv if chosen == "csv" else _read_json
        frame = read(spark, paths, {**_DEFAULTS[chosen], **theirs}, columns, charset)
        _refuse_overlooked(files, frame.inputFiles())
        return frame


def _read_csv(
    spark: "SparkSession",
    paths: Sequence[str],
    given: Mapping[str, str],
    columns: "StructType | None",
    charset: Charset,
) -> "DataFrame":
    load = partial(_load, spark, "csv", paths)
    lines = _lines(spark, paths, given)
    folders = [name for name in lines.columns if name != LINE]
    as_bytes = not (charset.is_wide or (charset.is_utf8 and all_utf8(lines)))
    if as_bytes:
        given = read_as_bytes(charset, given)
    elif charset.is_wide:
        given = {**given, "encoding": charset.name}
    if columns is None:
        columns = with_true_names(load(given, None).schema, charset, folders, as_bytes=as_bytes)
    columns = _with_corrupt_record(columns)
    decimals = {} if _option(given, "locale") is not None else decimals_of(columns)
    texts = as_text(columns, decimals)
    if as_bytes:
        marked = {}
        if charset.is_utf8 and _is_on(given, "multiLine"):  # where Spark cuts lines itself, it removes the mark
            marked = with_mark(spark, _listing(spark, paths, given))
            if any(marked.values()) and not _is_on(given, "header"):
                raise SourceError(
                    f"{_described(paths)} begins with a byte order mark and has no header, and not all of it is UTF-8; "
                    "remove the mark, or name the encoding"
                )
        frame = csv_records(partial(load, given), charset, texts, folders, marked, CORRUPT_RECORD)
    else:
        frame = load(given, texts)
        if charset.is_wide:
            frame = without_replaced(frame, charset, folders, CORRUPT_RECORD)
    return judged(_read_whole(frame), decimals, CORRUPT_RECORD)


def _read_json(
    spark: "SparkSession",
    paths: Sequence[str],
    given: Mapping[str, str],
    columns: "StructType | None",
    charset: Charset,
) -> "DataFrame":
    lines = _lines(spark, paths, given)
    # A file that is one document is parsed from its bytes, and not at all if they are not in its encoding.
    whole = _is_on(given, "multiLine")
    if whole or (charset.is_utf8 and all_utf8(lines)):
        given = {**given, "encoding": charset.name} if whole and not charset.is_utf8 else given
        load = partial(_load, spark, "json", paths)
        found = _inferred(lambda options: load(options, None).schema, given) if columns is None else columns
        return _read_whole(load(given, _with_corrupt_record(found)))
    if columns is None:
        columns = _inferred(lambda options: json_columns(lines, charset, options), given)
    return _read_whole(json_records(lines, charset, given, _with_corrupt_record(columns), CORRUPT_RECORD))


def source_of(spark: "SparkSession", paths: Sequence[str], *, options: Mapping[str, str] | None = None) -> Source:
    """Say what is read, and make out a digest by which to know it again.

    Args:
        spark: the session to look with.
        paths: as for ``read_events``.
        options: as for ``read_events``; those that choose among files matter.

    Raises:
        SourceError: there is nothing there.
    """
    from pyspark.sql import functions as sql

    listing = _listing(spark, paths, options)
    with explained(f"cannot list {_described(paths)}"):
        modified = sql.unix_micros("modificationTime")
        found = sorted(tuple(row) for row in listing.select("path", "length", modified).collect())
    if not found:
        raise SourceError(_nothing(paths))
    return Source(_described(paths), hashlib.sha256(json.dumps(found).encode()).digest())


def _listing(spark: "SparkSession", paths: Sequence[str], options: Mapping[str, str] | None) -> "DataFrame":
    """Return every file below the paths, without its content: Spark's own listing reaches whatever its readers do."""
    if isinstance(paths, str) or not paths:
        raise SourceError("give at least one path to read events from, in a list")
    choosing = {name: value for name, value in (options or {}).items() if name.lower() in _CHOOSING_FILES}
    with explained(f"cannot find {_described(paths)}"):
        return (
            spark.read.format("binaryFile").options(**choosing).option("recursiveFileLookup", "true").load(list(paths))
        )


def _files(spark: "SparkSession", paths: Sequence[str], options: Mapping[str, str] | None) -> list[str]:
    listing = _listing(spark, paths, options)
    with explained(f"cannot list {_described(paths)}"):
        files = listing.inputFiles()
    if not files:
        raise SourceError(_nothing(paths))
    return files


def _format(wanted: str | None, paths: Sequence[str], files: Sequence[str]) -> str:
    if wanted is not None:
        if wanted not in FORMATS:
            raise SourceError(f"format {wanted!r} is unknown; use one of {', '.join(FORMATS)}")
        return wanted
    names = paths if all(_format_by_name(path) for path in paths) else files
    found = {_format_by_name(name): name for name in reversed(names)}
    if None in found:
        raise SourceError(f"the name of {found[None]} does not tell its format; give format: {', '.join(FORMATS)}")
    if len(found) > 1:
        examples = ", ".join(f"{name} ({format_})" for format_, name in sorted(found.items(), key=str))
        raise SourceError(f"the files are of several formats: {examples}; read them one by one")
    return str(next(iter(found)))


def _format_by_name(path: str) -> str | None:
    name = path.rstrip("/").lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return next((format_ for ending, format_ in _ENDINGS.items() if name.endswith(ending)), None)


def _columns(schema: str) -> "StructType":
    from pyspark.sql import types

    try:
        with explained(f"schema {schema!r} is not Spark DDL such as 'event_id string, amount decimal(12,2)'"):
            parsed = types.DataType.fromDDL(schema)
    except SourceError as error:
        raise InvalidFields(str(error)) from error
    if not isinstance(parsed, types.StructType) or not parsed.fields:
        raise InvalidFields(f"schema {schema!r} names no columns; write it as 'event_id string, amount decimal(12,2)'")
    return parsed


def _with_corrupt_record(columns: "StructType") -> "StructType":
    from pyspark.sql import types

    kept = [field for field in columns.fields if field.name.lower() != CORRUPT_RECORD]
    if not kept:
        raise SourceError(
            "no line can be read, so there are no columns; see that the format is right, or give a schema"
        )
    return types.StructType([*kept, types.StructField(CORRUPT_RECORD, types.StringType())])


def _inferred(columns: "Callable[[Mapping[str, str]], StructType]", given: Mapping[str, str]) -> "StructType":
    """Find the columns of JSON.

    Spark's ``prefersDecimal`` turns numbers into decimals, which is wanted, and quoted digits too, which would make 7
    of the id "007". So it is asked only about what is floating-point without it.

    Args:
        columns: finds them with these options of Spark's reader.
        given: the options.
    """
    plain = columns(given)
    if not _has_floats(plain):
        return plain
    return cast("StructType", _without_floats(plain, columns({**given, "prefersDecimal": "true"})))


def _has_floats(type_: "DataType") -> bool:
    from pyspark.sql import types

    match type_:
        case types.StructType():
            return any(_has_floats(field.dataType) for field in type_.fields)
        case types.ArrayType():
            return _has_floats(type_.elementType)
    return isinstance(type_, types.DoubleType)


def _without_floats(plain: "DataType", decimals: "DataType") -> "DataType":
    """Replace each floating-point type by what the other type has in its place."""
    from pyspark.sql import types

    match plain, decimals:
        case types.StructType(), types.StructType():
            others = {field.name: field.dataType for field in decimals.fields}
            return types.StructType(
                [
                    types.StructField(
                        field.name, _without_floats(field.dataType, others.get(field.name, field.dataType))
                    )
                    for field in plain.fields
                ]
            )
        case types.ArrayType(), types.ArrayType():
            return types.ArrayType(_without_floats(plain.elementType, decimals.elementType))
        case types.DoubleType(), types.DecimalType():
            return decimals
    return plain


def _load(
    spark: "SparkSession", chosen: str, paths: Sequence[str], given: Mapping[str, str], columns: "StructType | None"
) -> "DataFrame":
    reader = spark.read.format(chosen).options(**given)
    with _folders_as_text(spark):
        return (reader if columns is None else reader.schema(columns)).load(list(paths))


@contextmanager
def _folders_as_text(spark: "SparkSession") -> Iterator[None]:
    """Have the values in folders' names read as text; Spark would make 7 of store=007, and has only a setting for it.

    A frame keeps the types that it was loaded with, so the setting is put back as it was.
    """
    before = spark.conf.get(_INFERENCE_OF_FOLDERS, None)
    spark.conf.set(_INFERENCE_OF_FOLDERS, "false")
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(_INFERENCE_OF_FOLDERS)
        else:
            spark.conf.set(_INFERENCE_OF_FOLDERS, before)


def _lines(spark: "SparkSession", paths: Sequence[str], given: Mapping[str, str]) -> "DataFrame":
    """Return the lines of the files as bytes, with the columns that are in names of folders."""
    choosing = {name: value for name, value in given.items() if name.lower() in _CHOOSING_LINES}
    return _load(spark, "text", paths, choosing, None)


def _option(given: Mapping[str, str], *names: str) -> str | None:
    """Return an option of Spark's reader, which may be written in capitals, by one of its names."""
    return next((value for name, value in given.items() if name.lower() in names), None)


def _is_on(given: Mapping[str, str], name: str) -> bool:
    # The last one counts: theirs, however it is written, after ours.
    values = [value for given_name, value in given.items() if given_name.lower() == name.lower()]
    return bool(values) and values[-1].lower() == "true"


def _read_whole(frame: "DataFrame") -> "DataFrame":
    """Have every column parsed, whatever a query asks for, by a condition on all of them that is always true.

    Otherwise a line that is malformed in one column counts as good in a query that asks for another, and Spark refuses
    queries that ask for the corrupt records alone.
    """
    from pyspark.sql import functions as sql

    every = sql.array(*[sql.isnull(sql.col(quoted(name))) for name in frame.columns])
    return frame.where(sql.size(every) >= 0)


def _refuse_overlooked(there: Sequence[str], read: Sequence[str]) -> None:
    """See that no file is passed over: Spark looks into folders below a path only if they are named key=value."""
    if overlooked := sorted(set(there) - set(read)):
        raise SourceError(
            f"{len(overlooked)} of {len(there)} files would be passed over, such as {overlooked[0]}: their folders are "
            "not named key=value; give the option recursiveFileLookup=true"
        )


def _described(paths: Sequence[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def _nothing(paths: Sequence[str]) -> str:
    return f"there are no files in {_described(paths)}; names that begin with _ or . do not count"


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise what Spark raises as one line: what cannot be done, and why."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except EncodingError as error:
        raise SourceError(f"{what}: {error}") from error
    except (PySparkException, Py4JError) as error:
        raise SourceError(f"{what}: {_why(_with_causes(error)) or type(error).__name__}") from error


def _with_causes(error: Exception) -> str:
    """Return what an error says; pyspark keeps Java's causes apart where it has an exception of its own for it."""
    return "\n".join(filter(None, (str(error), getattr(error, "_stackTrace", None))))


def _why(said: str) -> str:
    """Return what matters of what Spark says, in one line."""
    _, conflict, rest = said.partition("[CANNOT_MERGE_SCHEMAS]")
    if conflict:
        schemas = " ".join(rest.partition("SQLSTATE")[0].split())
        return f"{schemas} Give a schema with types that hold what every file has, or read the files apart"
    return said_by_spark(said)


_CORRUPT_OPTION = "columnNameOfCorruptRecord"
_PERMISSIVE = {"mode": "PERMISSIVE", _CORRUPT_OPTION: CORRUPT_RECORD}
_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "parquet": {"mergeSchema": "true"},
    "json": _PERMISSIVE,
    "csv": {
        **_PERMISSIVE,
        "header": "true",
        "enforceSchema": "false",
        # So one task reads a whole file: only the beginning tells which quotes open a field.
        "multiLine": "true",
        "escape": '"',
        # Across lines, a quote that is never closed would end at the next field's, and the events between be its text.
        "unescapedQuoteHandling": "RAISE_ERROR",
        "emptyValue": "",
        # Spark cannot tell an empty field from an empty text, unless null is a text; so one that Postgres cannot hold.
        "nullValue": "\0null\0",
    },
}
_INFERENCE_OF_FOLDERS = "spark.sql.sources.partitionColumnTypeInference.enabled"
_ENDINGS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv"}
_COMPRESSED = (".gz", ".bz2", ".zst")
_ENCODING_OPTIONS = ("encoding", "charset")
_CHOOSING_FILES = ("pathglobfilter", "modifiedbefore", "modifiedafter", "ignoremissingfiles", "timezone")
_CHOOSING_LINES = (*_CHOOSING_FILES, "recursivefilelookup", "basepath", "linesep", "ignorecorruptfiles")
