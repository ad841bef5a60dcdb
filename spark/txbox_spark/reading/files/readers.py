"""Reads each format: with Spark's own reader if the files' bytes are valid text, otherwise from the bytes."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, cast
from urllib.parse import unquote

from txbox_spark.reading.columns import CORRUPT_RECORD, quoted
from txbox_spark.reading.errors import EncodingError, SourceError
from txbox_spark.reading.files.csv_records import (
    CSV_LINE,
    Header,
    as_pattern,
    as_text,
    checked_records,
    decimals_of,
    files_by_header,
    quoting_of,
    refuse_unclosed,
)
from txbox_spark.reading.files.encodings import (
    LINE,
    OF_DOCUMENTS,
    Charset,
    all_json,
    all_text,
    charset_named,
    checked_documents,
    csv_records,
    decoded_lines,
    json_columns,
    json_records,
    read_as_bytes,
    with_mark,
    with_true_names,
    without_replaced,
)
from txbox_spark.reading.files.file_listing import (
    CHOOSING_FILES,
    FILES_ALONE,
    described,
    file_of,
    folder_columns,
    json_keys_among,
    listing,
    refuse_in_both,
)
from txbox_spark.reading.files.json_values import exact_columns, has_more, refuse_more, with_texts_of_numbers
from txbox_spark.reading.files.parquet_columns import (
    NANOSECONDS_AS_NUMBERS,
    nanosecond_columns,
    widest,
    with_times,
)
from txbox_spark.runtime.jobs import changed_settings
from txbox_spark.runtime.lazy_imports import DataFrame, SparkSession, StructType, spark_errors, sql, types

__all__ = ["CORRUPT_OPTION", "CORRUPT_RECORD", "read"]

CORRUPT_OPTION = "columnNameOfCorruptRecord"
"""Spark's option that names the column ``CORRUPT_RECORD``; only we may set it."""


def read(
    spark: SparkSession,
    format_: str,
    paths: Sequence[str],
    columns: StructType | None,
    encoding: str | None,
    options: Mapping[str, str],
) -> DataFrame:
    """Read files of one format; JSON and CSV get the column ``CORRUPT_RECORD``.

    The arguments are those of ``read_events``, except ``columns``; None means that they are found in the files.

    Raises:
        SourceError, EncodingError: the files cannot be read like this.
    """
    # The caller's options may differ in case, and only one of two options with the same name is kept.
    defaults = {name: value for name, value in _DEFAULTS[format_].items() if _option(options, name.lower()) is None}
    if format_ == "parquet":
        if encoding is not None:
            raise SourceError("an encoding is for CSV and JSON: texts in Parquet are UTF-8")
        return _read_parquet(spark, paths, {**defaults, **options}, columns)
    if encoding is None:
        encoding = _option(options, *_ENCODING_OPTIONS)
    charset = charset_named(spark, "UTF-8" if encoding is None else encoding)
    theirs = {name: value for name, value in options.items() if name.lower() not in _ENCODING_OPTIONS}
    read_as = _read_csv if format_ == "csv" else _read_json
    return read_as(spark, paths, {**defaults, **theirs}, columns, charset)


def _read_parquet(
    spark: SparkSession, paths: Sequence[str], given: Mapping[str, str], columns: StructType | None
) -> DataFrame:
    try:
        frame = _load(spark, "parquet", paths, given, columns)
    except spark_errors() as error:
        if columns is not None:
            raise
        frame = _read_unlike_parquet(spark, paths, given, error)
    if folders := folder_columns(frame):
        alone = {**given, **FILES_ALONE}
        with changed_settings(spark, NANOSECONDS_AS_NUMBERS):
            try:
                in_files = _load(spark, "parquet", paths, alone, None).columns
            except spark_errors():  # the files' types conflict; the schema decides
                each = [
                    _load(spark, "parquet", [as_pattern(unquote(file))], alone, None) for file in frame.inputFiles()
                ]
                in_files = [name for one in each for name in one.columns]
        refuse_in_both(folders, in_files, described(paths))
    return frame


def _read_unlike_parquet(
    spark: SparkSession, paths: Sequence[str], given: Mapping[str, str], error: Exception
) -> DataFrame:
    """Read Parquet whose columns Spark cannot find; raise ``error`` if we cannot find them either."""
    columns: StructType | None
    files = sorted(str(path) for (path,) in listing(spark, paths, given).select("path").collect())
    with changed_settings(spark, NANOSECONDS_AS_NUMBERS):
        try:
            columns = _load(spark, "parquet", paths, given, None).schema
        except spark_errors() as unlike:
            error = unlike
            alone = {**given, **FILES_ALONE}
            columns = widest(_load(spark, "parquet", [as_pattern(file)], alone, None).schema for file in files)
    nanoseconds = nanosecond_columns(spark, files)
    if columns is None:
        raise error
    frame = _load(spark, "parquet", paths, given, columns)
    return with_times(frame, nanoseconds) if nanoseconds else frame


def _read_csv(
    spark: SparkSession,
    paths: Sequence[str],
    given: Mapping[str, str],
    columns: StructType | None,
    charset: Charset,
) -> DataFrame:
    load = partial(_load, spark, "csv", paths)
    lines = _lines(spark, paths, given)
    folders = folder_columns(lines)
    if not charset.is_wide and not _is_on(given, "multiLine"):
        _refuse_nul(lines)
    if charset.is_wide:
        as_bytes, has_quote = False, True
        given = {**given, "encoding": charset.name}
    else:
        text, has_quote = all_text(lines, (_option(given, "quote") or '"').encode(charset.codec, "ignore"))
        as_bytes = not (charset.is_utf8 and text)
        if as_bytes:
            given = read_as_bytes(charset, given)
    if has_quote:
        _refuse_unclosed(spark, load, given, charset.codec if as_bytes else None)
    headers: list[Header] = []
    if _is_on(given, "header"):
        headers = _csv_headers(spark, paths, given, charset, as_bytes=as_bytes)
        refuse_in_both(folders, [name for header in headers for name in header.names], described(paths))
    columns_of = "the schema"
    if columns is None:
        if headers and not _is_on(given, "inferSchema"):
            columns = types.StructType([types.StructField(name, types.StringType()) for name in headers[0].names])
        else:
            columns = with_true_names(load(given, None).schema, charset, folders, as_bytes=as_bytes)
        columns_of = headers[0].shown if headers else ""
    columns = _with_corrupt_record(columns)
    decimals = {} if _option(given, "locale") is not None else decimals_of(columns)
    texts = as_text(columns, decimals)
    marked: dict[str, bool] = {}
    # Without multiLine, Spark cuts the lines itself, and removes the mark.
    if as_bytes and charset.is_utf8 and _is_on(given, "multiLine"):
        marked = with_mark(spark, listing(spark, paths, given))
        if any(marked.values()) and not _is_on(given, "header"):
            raise SourceError(
                f"{described(paths)} begins with a byte order mark and has no header, and not all of it is UTF-8; "
                "remove the mark, or name the encoding"
            )

    def records(load: Callable[[StructType], DataFrame], texts: StructType) -> DataFrame:
        if as_bytes:
            frame = csv_records(load, charset, texts, folders, marked)
        else:
            frame = load(texts)
            if charset.is_wide:
                frame = without_replaced(frame, charset, folders)
        return checked_records(_read_whole(frame), decimals)

    if not headers or _is_on(given, "enforceSchema"):
        return records(partial(load, given), texts)
    apart = (*folders, CORRUPT_RECORD)
    found = [
        records(partial(header.read, partial(load, given)), header.ordered(texts, apart, columns_of))
        for header in headers
    ]
    places = {name.lower(): place for place, name in enumerate(texts.names)}
    order = sorted(found[0].columns, key=lambda name: places.get(name.lower(), len(places)))
    alike = [frame.select([sql.col(quoted(name)) for name in order]) for frame in found]
    return reduce(lambda some, more: some.union(more), alike)


def _csv_headers(
    spark: SparkSession, paths: Sequence[str], given: Mapping[str, str], charset: Charset, *, as_bytes: bool
) -> list[Header]:
    """Return the distinct headers of CSV files, the first file's first; empty if the files are empty."""
    alone = {**given, **FILES_ALONE, "header": "false", "inferSchema": "false"}
    null = _option(given, "nullvalue") or ""
    quote, comment = _option(given, "quote"), _option(given, "comment") or ""
    marks = {
        "quote": ('"' if quote is None else quote).encode(charset.codec, "ignore"),
        "comment": comment.encode(charset.codec, "ignore"),
    }
    groups = files_by_header(spark, listing(spark, paths, given), **marks)
    headers = []
    for begin, group in groups.items():
        of = [as_pattern(group[0][0])] if begin else paths
        tokens = _load(spark, "csv", of, alone, None).head()
        if tokens is None:
            continue
        unnamed = {place: null if token is None else token for place, token in enumerate(tokens) if not token}
        written = types.StructType([types.StructField(token or "", types.StringType()) for token in tokens])
        names = with_true_names(written, charset, (), as_bytes=as_bytes).names
        files: Sequence[str] = () if len(groups) == 1 else [file for _, file in group]
        names = [f"_c{place}" if place in unnamed else name for place, name in enumerate(names)]
        headers.append(Header(tuple(names), unnamed, tuple(files), group[0][0]))
    return headers


def _refuse_nul(lines: DataFrame) -> None:
    """Raise ``SourceError`` for a NUL character: without multiLine, Spark trims it, and two ids may become one."""
    found = lines.where(sql.contains(LINE, sql.lit("\0"))).select(file_of(lines)).head()
    if found is not None:
        raise SourceError(
            f"{found[0]} holds a NUL character, which Spark may drop with multiLine=false; leave multiLine out, so "
            "that such rows are rejected, or remove it"
        )


def _refuse_unclosed(
    spark: SparkSession,
    load: Callable[[Mapping[str, str], StructType], DataFrame],
    given: Mapping[str, str],
    codec: str | None,
) -> None:
    def shown(text: str) -> str:
        text = text if codec is None else text.encode("latin-1").decode(codec, "replace")
        return " ".join(text.splitlines())

    separator = _option(given, "sep") or _option(given, "delimiter") or ","
    # Spark's own function understands that "\\t" is a tab.
    separator = str(cast("Any", spark._jvm).org.apache.spark.sql.catalyst.csv.CSVExprUtils.toDelimiterStr(separator))  # noqa: SLF001
    quoting = quoting_of(given, separator)
    if quoting is not None:
        kept = {name: value for name, value in given.items() if name.lower() in _CHOOSING_CSV_LINES}
        lines = load({**kept, **_CSV_LINES}, types.StructType([types.StructField(CSV_LINE, types.StringType())]))
        refuse_unclosed(lines, quoting, whole=_is_on(given, "multiLine"), shown=shown)


def _read_json(
    spark: SparkSession,
    paths: Sequence[str],
    given: Mapping[str, str],
    columns: StructType | None,
    charset: Charset,
) -> DataFrame:
    # Spark parses a file that is one document from its bytes, and cannot do so in every encoding.
    whole = _is_on(given, "multiLine")
    if whole and charset.name not in OF_DOCUMENTS:
        raise EncodingError(
            f"with multiLine, JSON can be in {', '.join(OF_DOCUMENTS)}, not in {charset.name}; convert it"
        )
    lines = _lines(spark, paths, given, whole=whole)
    as_usual = not whole and charset.is_utf8 and all_json(lines, has_more(sql.col(LINE), given))
    if not as_usual:
        refuse_more(decoded_lines(lines, charset), given, whole=whole)
    if folders := folder_columns(lines):
        keys = json_keys_among(sql.col(LINE), folders, given)
        found_keys = decoded_lines(lines, charset).select(sql.explode(keys).alias(LINE)).head()
        refuse_in_both(folders, () if found_keys is None else found_keys, described(paths))
    texts = partial(with_texts_of_numbers, decoded_lines(lines, charset), given)
    if as_usual or whole:
        given = {**given, "encoding": charset.name} if whole and not charset.is_utf8 else given
        load = partial(_load, spark, "json", paths)
        if columns is None:
            exact = partial(load, given) if charset.is_utf8 else texts
            columns = exact_columns(spark, lambda options: load(options, None).schema, exact, given)
        frame = load(given, _with_corrupt_record(columns))
        return _read_whole(checked_documents(frame, lines, charset) if whole else frame)
    if columns is None:
        columns = exact_columns(
            spark,
            lambda options: json_columns(lines, charset, options),
            texts,
            given,
        )
    return _read_whole(json_records(lines, charset, given, _with_corrupt_record(columns)))


def _with_corrupt_record(columns: StructType) -> StructType:
    kept = [field for field in columns.fields if field.name.lower() != CORRUPT_RECORD]
    if not kept:
        raise SourceError(
            "no line can be read, so there are no columns; see that the format is right, or give a schema"
        )
    return types.StructType([*kept, types.StructField(CORRUPT_RECORD, types.StringType())])


def _load(
    spark: SparkSession, format_: str, paths: Sequence[str], given: Mapping[str, str], columns: StructType | None
) -> DataFrame:
    reader = spark.read.format(format_).options(**given)
    with changed_settings(spark, _FOLDERS_AS_TEXT):
        return (reader if columns is None else reader.schema(columns)).load(list(paths))


def _lines(spark: SparkSession, paths: Sequence[str], given: Mapping[str, str], *, whole: bool = False) -> DataFrame:
    """Return the lines of the files, or the whole files, as bytes, with the columns that come from folder names."""
    choosing = {name: value for name, value in given.items() if name.lower() in _CHOOSING_LINES}
    lines = _load(spark, "text", paths, {**choosing, "wholetext": str(whole).lower()}, None)
    if any(name.lower() == LINE for name in folder_columns(lines)):
        raise SourceError(
            f"folders of {described(paths)} are named {LINE}=…, as Spark names the lines of a file; rename them, or "
            "give the option recursiveFileLookup=true, which leaves out what folders' names say"
        )
    return lines


def _option(given: Mapping[str, str], *names: str) -> str | None:
    """Return an option of Spark's reader by one of its names, in lower case; ``given`` may have it in any case."""
    # The last one wins, because the caller's options come after ours.
    return next((value for name, value in reversed(list(given.items())) if name.lower() in names), None)


def _is_on(given: Mapping[str, str], name: str) -> bool:
    return (_option(given, name.lower()) or "").lower() == "true"


def _read_whole(frame: DataFrame) -> DataFrame:
    """Make Spark parse every column, with a condition on all of them that is always true.

    Otherwise a line that is malformed in one column counts as good in a query for another, and Spark refuses queries
    for only the corrupt records.
    """
    every = sql.array(*[sql.isnull(sql.col(quoted(name))) for name in frame.columns])
    return frame.where(sql.size(every) >= 0)


_PERMISSIVE = {"mode": "PERMISSIVE", CORRUPT_OPTION: CORRUPT_RECORD}
_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "parquet": {"mergeSchema": "true"},
    "json": _PERMISSIVE,
    "csv": {
        **_PERMISSIVE,
        "header": "true",
        "enforceSchema": "false",
        # One task must read a whole file, because only its beginning tells which quotes open a field.
        "multiLine": "true",
        "escape": '"',
        # Otherwise an unclosed quote would end at the next field's quote, and the events in between would be its text.
        "unescapedQuoteHandling": "RAISE_ERROR",
        "emptyValue": "",
        # Spark can tell an empty field from an empty text only if null is a text, so use one that no file contains.
        "nullValue": f"\0{secrets.token_hex(16)}\0",
    },
}
_FOLDERS_AS_TEXT = {"spark.sql.sources.partitionColumnTypeInference.enabled": "false"}
"""Otherwise Spark would read store=007 in a folder's name as 7; it has no option for this, only a setting."""
_ENCODING_OPTIONS = ("encoding", "charset")
_CHOOSING_LINES = (*CHOOSING_FILES, "recursivefilelookup", "basepath", "linesep", "ignorecorruptfiles")
_CHOOSING_CSV_LINES = (*_CHOOSING_LINES, "encoding", "multiline", "inputbuffersize")
# With these characters, which Unicode does not assign, a line is one field.
_CSV_LINES = {"sep": "\ufdd0", "quote": "\ufdd1", "escape": "\ufdd1", "nullValue": "\ufdd2"}
