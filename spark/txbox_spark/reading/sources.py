"""Reads events from files, Parquet, JSON lines and CSV, so that nothing is dropped or changed.

Spark's readers are lenient by default. Where that would lose or alter an event, the defaults here differ:

- A line that cannot be read stays in the result, with its text in the column ``_corrupt_record``. Spark parses only the
  columns that a query asks for, so the result always asks for all of them.
- CSV files may have their columns in different orders. A header that lacks a column, has an extra one or has one twice
  is an error. A column without a name is called ``_c`` and its position: see ``csv_records``. A quoted ``""`` is an
  empty text; an empty field is null. A quote within quotes is doubled (RFC 4180), as Postgres and spreadsheets write
  it; a quote that is not doubled fails the query. A quoted field may hold line breaks. A file that ends within quotes,
  as a truncated one may, is an error: see ``csv_records``.
- A decimal in CSV consists of digits, with an optional sign, point and exponent. Anything else, such as 12,50, or a
  decimal that does not fit its type to the last digit, makes the record malformed. With the option ``locale``, Spark
  parses decimals, and rounds them.
- JSON numbers never become floating-point numbers if a decimal can hold them, and a quoted text stays text. If no
  decimal can, and another number would change, it is an error: see ``json_values``.
- Parquet files need not all have the same columns: the result has those of every file. Times in nanoseconds are read if
  they are whole microseconds, and whole numbers with the widest type of the files: see ``parquet_columns``.
- The value in a folder's name, such as ``store=007``, is text, unless the schema says otherwise.
- Folders below a path that Spark would skip are an error, and so are files beside folders named ``store=007``.
- A column that is both in the files and in the names of their folders is an error.
- A NUL character in CSV is an error with ``multiLine=false``, because Spark would drop it at the ends of a field or a
  line.
- More than one JSON value on a line, or in a document, is an error: see ``json_values``.
- Bytes that are invalid in the files' encoding make a CSV record, or a line of JSON, malformed, and so do escapes of
  lone surrogates in JSON: see ``encodings``.

What we do not detect:

- Parquet: of nanoseconds in INT96, Spark drops what is not a whole microsecond.
- JSON: a decimal with more digits after the point than the schema has is rounded, and a quoted one loses its commas:
  ``"12,50"`` becomes 1250.
- JSON with a line that is not UTF-8, or in another encoding: read as text, a number with a fraction or an exponent is
  written as Java writes it, so 1.10 becomes 1.1.
- CSV: if lines end with CR LF, a line break within quotes becomes a single LF. Lines that end differently from the
  first line of their file may be rejected together, as one record, or become one field; an id with a line break is
  rejected, see ``event_rows``. Blanks after a field's closing quote are dropped. With a custom
  ``unescapedQuoteHandling``, or a ``charToEscapeQuoteEscaping`` other than ``escape``, if a file ends within quotes,
  the last field of the last record is all the text from its quote on.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from txbox.effects import Field
from txbox_spark.reading.columns import quoted
from txbox_spark.reading.errors import InvalidFields, SourceError, explained
from txbox_spark.reading.fields import schema_of
from txbox_spark.reading.files.file_listing import described, files_in, listing, nothing_in, refuse_overlooked
from txbox_spark.reading.files.readers import CORRUPT_OPTION, CORRUPT_RECORD, read
from txbox_spark.runtime.executor_watcher import EXECUTOR_SECONDS, ExecutorWatcher
from txbox_spark.runtime.jobs import job_group
from txbox_spark.runtime.lazy_imports import DataFrame, SparkSession, StructType, sql, types

FORMATS = ("parquet", "json", "csv")
"""Formats that events can be read from; json means one JSON object per line."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """What events are read from.

    Attributes:
        description: for people.
        digest: SHA-256 of the files' names, sizes and times, which must be the same when a run is resumed.
    """

    description: str
    digest: bytes


def read_events(
    spark: SparkSession,
    paths: Sequence[str],
    *,
    format: str | None = None,  # noqa: A002 - as Spark calls it
    schema: str | None = None,
    fields: Mapping[str, Field] | None = None,
    message_id: str = "",
    encoding: str | None = None,
    options: Mapping[str, str] | None = None,
    executor_seconds: float = EXECUTOR_SECONDS,
) -> DataFrame:
    """Read events from files.

    JSON and CSV files are read once here, to check that their bytes are text; CSV with quotes is read again, to check
    that they are closed.

    Args:
        spark: the Spark session.
        paths: files, folders or patterns, on anything that Spark's Hadoop can reach.
        format: one of ``FORMATS``; None means that the files' names decide.
        schema: the columns as Spark DDL, such as ``event_id string, amount decimal(12,2)``. Without it, JSON is read
            completely once or twice to find its columns, and all columns of CSV are text.
        fields: instead of a schema, the fields of the ``SqlEffect`` that will apply the events. Their values in JSON
            and CSV are read as text, as a worker reads them, and JSON must be as strict. In CSV without a header, they
            are the columns, in order.
        message_id: with ``fields``, the column that holds the id, or an expression, as for ``bulk_load``.
        encoding: the encoding of JSON and CSV, if it is not UTF-8, such as ``latin1`` or ``cp1252``.
        options: options of Spark's reader, which win over ours.
        executor_seconds: how long to wait for an executor on a cluster.

    Returns:
        The events; those from JSON and CSV have the column ``CORRUPT_RECORD``.

    Raises:
        SourceError: there are no files, or they cannot be read.
        ExecutorsMissing: no executor came in time.
    """
    files = files_in(spark, paths, options)
    chosen = _format(format, paths, files)
    if any(name.lower() == CORRUPT_OPTION.lower() for name in options or {}):
        raise SourceError(f"option {CORRUPT_OPTION} cannot be set: malformed lines are in {CORRUPT_RECORD}")
    if fields is not None and chosen == "json":
        schema = schema_of(fields, *_names_in(message_id))
        options = {**STRICT_JSON, **(options or {})}
    elif fields is not None and chosen == "csv" and _has_no_header(options or {}):
        schema = ", ".join(f"{quoted(name)} string" for name in fields)
    columns = None if schema is None else _columns(schema)
    with (
        explained(f"cannot read {described(paths)} as {chosen}"),
        job_group(spark.sparkContext, f"txbox: read {described(paths)}") as group,
        ExecutorWatcher(spark, executor_seconds).awaiting(group),
    ):
        frame = read(spark, chosen, paths, columns, encoding, options or {})
        refuse_overlooked(files, frame)
        return frame


def source_of(
    spark: SparkSession,
    paths: Sequence[str],
    *,
    options: Mapping[str, str] | None = None,
    executor_seconds: float = EXECUTOR_SECONDS,
) -> EventSource:
    """Return the source that ``read_events`` reads with these arguments.

    Raises:
        SourceError: there are no files.
        ExecutorsMissing: no executor came in time.
    """
    files = listing(spark, paths, options)
    with (
        explained(f"cannot list {described(paths)}"),
        job_group(spark.sparkContext, f"txbox: list {described(paths)}") as group,
        ExecutorWatcher(spark, executor_seconds).awaiting(group),
    ):
        modified = sql.unix_micros("modificationTime")
        found = sorted(tuple(row) for row in files.select("path", "length", modified).collect())
    if not found:
        raise SourceError(nothing_in(paths))
    return EventSource(described(paths), hashlib.sha256(json.dumps(found).encode()).digest())


def _format(wanted: str | None, paths: Sequence[str], files: Sequence[str]) -> str:
    if wanted is not None:
        if wanted.lower() in _NOT_READ:
            raise SourceError(_not_read(wanted.lower()))
        if wanted not in FORMATS:
            raise SourceError(f"format {wanted!r} is unknown; use one of {', '.join(FORMATS)}")
        return wanted
    names = paths if all(_format_by_name(path) for path in paths) else files
    found = {_format_by_name(name): name for name in reversed(names)}
    if None in found:
        ending = str(found[None]).rstrip("/").rpartition(".")[2].lower()
        if ending in _NOT_READ:
            raise SourceError(f"{found[None]}: {_not_read(ending)}")
        raise SourceError(f"the name of {found[None]} does not tell its format; give format: {', '.join(FORMATS)}")
    if len(found) > 1:
        examples = ", ".join(f"{name} ({format_})" for format_, name in sorted(found.items(), key=str))
        raise SourceError(f"the files are of several formats: {examples}; read them one by one")
    return str(next(iter(found)))


def _not_read(format_: str) -> str:
    return (
        f"events are read from {', '.join(FORMATS)}, and not from {format_}; in Python, give bulk_load what "
        f"spark.read.format('{format_}').load(…) returns, or convert the files"
    )


def _format_by_name(path: str) -> str | None:
    name = path.rstrip("/").lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return next((format_ for ending, format_ in _ENDINGS.items() if name.endswith(ending)), None)


def _columns(schema: str) -> StructType:
    try:
        with explained(f"schema {schema!r} is not Spark DDL such as 'event_id string, amount decimal(12,2)'"):
            parsed = types.DataType.fromDDL(schema)
    except SourceError as error:
        raise InvalidFields(str(error)) from error
    if not isinstance(parsed, types.StructType) or not parsed.fields:
        raise InvalidFields(f"schema {schema!r} names no columns; write it as 'event_id string, amount decimal(12,2)'")
    return parsed


def _has_no_header(options: Mapping[str, str]) -> bool:
    return any(name.lower() == "header" and value.lower() == "false" for name, value in options.items())


def _names_in(expression: str) -> list[str]:
    """Return what may be column names in a Spark SQL expression; a few others do no harm."""
    return [quoted or plain for quoted, plain in _NAME.findall(_LITERAL.sub("''", expression))]


_LITERAL = re.compile("'(?:[^'\\\\]|\\\\.)*'")
_NAME = re.compile(r"`([^`]+)`|(?<![\w.])([A-Za-z_]\w*)(?!\w|\s*\()")

STRICT_JSON = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}
"""Refuses what Spark accepts as JSON by default, but a worker does not."""

_ENDINGS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv"}
_NOT_READ = ("orc", "avro")
_COMPRESSED = (".gz", ".bz2", ".zst")
