r"""Text of files: bytes that are not in the files' encoding are reported, and never replaced.

Java puts U+FFFD in place of bytes that it cannot decode, and so do Spark's readers: two ids become one. Afterwards that
cannot be told from a U+FFFD that was in the file. So the lines are looked at as bytes first, in one fast pass. Files in
which every line is UTF-8 are read as ever. For others the readers are kept from decoding:

- CSV is read as ISO-8859-1, in which every byte is a character, and each field is decoded by itself.
- JSON is read as lines of bytes, and only those that can be decoded are parsed.

In an encoding other than UTF-8, U+FFFD cannot be told from bytes that are not in it, so both are refused.

JSON has another way to write what is not text: an escape such as ``\ud800``, one half of a surrogate pair without the
other half. Java puts "?" for it. So such escapes are looked for in the lines, too.
"""

import codecs
import json
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from txbox_spark.reading.charsets import EVERY_CHARSET, REMEDY, REPLACED, Charset, EncodingError
from txbox_spark.reading.columns import quoted
from txbox_spark.runtime.jobs import changed_settings
from txbox_spark.runtime.lazy import sql, types

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

__all__ = [
    "LINE",
    "OF_DOCUMENTS",
    "all_text",
    "all_utf8",
    "checked_documents",
    "csv_records",
    "json_columns",
    "json_records",
    "read_as_bytes",
    "with_mark",
    "with_true_names",
    "without_replaced",
]

LINE = "value"
"""What Spark calls the column with a line of a text file."""


OF_DOCUMENTS = ("UTF-8", "UTF-16", "UTF-16LE", "UTF-16BE", "ISO-8859-1", "US-ASCII")
"""The encodings, as Java calls them, in which Spark reads a document of JSON."""


def all_utf8(lines: "DataFrame") -> bool:
    """Return whether every line is UTF-8: one pass over the bytes, which ends at the first line that is not."""
    return lines.where(~sql.is_valid_utf8(LINE)).select(sql.lit(1)).isEmpty()


def all_text(lines: "DataFrame") -> bool:
    """Return whether every line of JSON is UTF-8 and has no lone surrogate, in one pass as ``all_utf8`` does."""
    return lines.where(~sql.is_valid_utf8(LINE) | _has_lone(sql.col(LINE))).select(sql.lit(1)).isEmpty()


# -- CSV --------------------------------------------------------------------------------------------------------------


def read_as_bytes(charset: Charset, given: Mapping[str, str]) -> dict[str, str]:
    """Return options of Spark's reader by which every byte is read as one character.

    Raises:
        EncodingError: one of the options cannot be written in this encoding.
    """
    options = {name: value if name.lower() in _OF_FILES else charset.in_latin1(value) for name, value in given.items()}
    return {**options, "encoding": "ISO-8859-1"}


def with_true_names(
    header: "StructType", charset: Charset, folders: Collection[str], *, as_bytes: bool
) -> "StructType":
    """Return the columns of a header, those of folders left out, by the names that it gives them in its encoding.

    Raises:
        EncodingError: a name is not in it.
    """
    fields = []
    for field in header.fields:
        if field.name in folders:
            continue
        try:
            name = field.name.removeprefix(_MARK).encode("latin-1").decode(charset.codec) if as_bytes else field.name
        except UnicodeError:
            name = REPLACED
        if REPLACED in name:
            shown = field.name.encode("latin-1", "replace").decode("ascii", "backslashreplace")
            raise EncodingError(f"the column name {shown} in the header is not {charset.name} ({REMEDY})")
        fields.append(types.StructField(name, field.dataType))
    return types.StructType(fields)


def with_mark(spark: "SparkSession", files: "DataFrame") -> dict[str, bool]:
    """Return whether each file begins with the byte order mark of UTF-8.

    Args:
        spark: the session.
        files: as Spark lists them in the format ``binaryFile``.

    Returns:
        By what a file is called in ``_metadata.file_path``.
    """
    jvm: Any = spark._jvm  # noqa: SLF001 pyspark has no other way to open a file of Hadoop's
    hadoop: Any = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    compression = jvm.org.apache.hadoop.io.compress.CompressionCodecFactory(hadoop)
    found = {}
    for path, file in files.select("path", _FILE).collect():
        file_path = jvm.org.apache.hadoop.fs.Path(path)
        stream = file_path.getFileSystem(hadoop).open(file_path)
        try:
            codec = compression.getCodec(file_path)
            content = stream if codec is None else codec.createInputStream(stream)
            found[file] = bytes(max(content.read(), 0) for _ in range(3)) == codecs.BOM_UTF8
        finally:
            stream.close()
    return found


def csv_records(
    load: "Callable[[StructType], DataFrame]",
    charset: Charset,
    columns: "StructType",
    folders: Collection[str],
    marked: Mapping[str, bool],
    corrupt_record: str,
) -> "DataFrame":
    """Read CSV field by field. A record with a field that is not in its encoding has its text in ``corrupt_record``.

    Args:
        load: reads the files as ``read_as_bytes`` has it.
        charset: of the files.
        columns: with their true names, and ``corrupt_record``.
        folders: the columns that are no fields, but in names of folders.
        marked: which files begin with a byte order mark that is read as part of their header.
        corrupt_record: the name of that column.
    """
    apart = {name.lower() for name in (*folders, corrupt_record)}
    kinds = sorted(set(marked.values())) or [False]
    found = []
    for mark in kinds:
        true_names: dict[str, str] = {}
        for field in columns.fields:
            name = field.name if field.name.lower() in apart else charset.in_latin1(field.name)
            true_names[_MARK + name if mark and not true_names else name] = field.name
        fields = zip(true_names, columns.fields, strict=True)
        frame = load(types.StructType([types.StructField(name, field.dataType) for name, field in fields]))
        if len(kinds) > 1:
            # Of the others, Spark does not even open a file.
            frame = frame.where(sql.col(_FILE).isin([file for file, one in marked.items() if one == mark]))
        found.append(_decoded(frame, charset, true_names, apart, corrupt_record))
    return found[0] if len(found) == 1 else found[0].union(found[1])


def _decoded(
    frame: "DataFrame", charset: Charset, true_names: Mapping[str, str], apart: Collection[str], corrupt_record: str
) -> "DataFrame":
    """Return records of CSV that were read as bytes, with true names and texts."""

    def decoded(value: "Column") -> "Column":
        return charset.decoded(sql.encode(value, "ISO-8859-1"))

    values, texts, in_file = {}, [], []
    with changed_settings(frame.sparkSession, EVERY_CHARSET):
        for field in frame.schema.fields:
            name, value = true_names.get(field.name, field.name), sql.col(quoted(field.name))
            if name.lower() not in apart:
                in_file.append(value.alias(name))
                if isinstance(field.dataType, types.StringType):
                    texts.append(name)
                    value = decoded(value)
            values[name] = value
        line = decoded(sql.to_csv(sql.struct(*in_file), _AS_IT_WAS))
        cause = _cause(charset.cause, [(f"column {name}", charset.refused(values[name])) for name in texts], line)
        # What Spark could not read is only shown.
        values[corrupt_record] = sql.coalesce(cause, sql.make_valid_utf8(decoded(values[corrupt_record])))
        return frame.select([value.alias(name) for name, value in values.items()])


def without_replaced(
    frame: "DataFrame", charset: Charset, folders: Collection[str], corrupt_record: str
) -> "DataFrame":
    """Call records malformed that Spark has decoded, and that have U+FFFD in a text."""
    apart = {*folders, corrupt_record}
    fields = [field for field in frame.schema.fields if field.name not in apart]
    texts = [field.name for field in fields if isinstance(field.dataType, types.StringType)]
    line = sql.to_csv(sql.struct(*[sql.col(quoted(field.name)) for field in fields]), _AS_IT_WAS)
    cause = _cause(charset.cause, [(f"column {name}", charset.refused(sql.col(quoted(name)))) for name in texts], line)
    return frame.withColumn(corrupt_record, sql.coalesce(cause, sql.col(corrupt_record)))


# -- JSON -------------------------------------------------------------------------------------------------------------


def json_columns(lines: "DataFrame", charset: Charset, given: Mapping[str, str]) -> "StructType":
    """Find the columns of those lines of JSON that are in their encoding, and have no lone surrogate."""
    wrong = charset.refused(sql.col(LINE)) | _has_lone(sql.col(LINE))
    text = _decoded_lines(lines, charset).where(~wrong).select(LINE)
    session: Any = lines.sparkSession
    # pyspark's own way from lines to columns leads through Python.
    jvm, reader = session._jvm, session._jsparkSession.read().options(dict(given))  # noqa: SLF001
    strings = getattr(text._jdf, "as")(jvm.org.apache.spark.sql.Encoders.STRING())  # noqa: SLF001
    return types.StructType.fromJson(json.loads(str(reader.json(strings).schema().json())))


def json_records(
    lines: "DataFrame", charset: Charset, given: Mapping[str, str], columns: "StructType", corrupt_record: str
) -> "DataFrame":
    """Parse lines of JSON. One that is not text all through is not parsed; it is text in ``corrupt_record``.

    Args:
        lines: of the files, as bytes, with the columns that are in names of folders.
        charset: of the files.
        given: options of Spark's reader.
        columns: with ``corrupt_record``.
        corrupt_record: the name of that column.
    """
    if charset.is_wide:
        raise EncodingError(f"JSON in {charset.name} cannot be read line by line; convert the files to UTF-8 first")
    folders = [name for name in lines.columns if name != LINE]
    declared = {field.name.lower(): field.dataType for field in columns.fields}
    fields = [field for field in columns.fields if field.name.lower() not in {name.lower() for name in folders}]
    line, parsed = sql.col(LINE), sql.col("parsed")
    lone = _has_lone(line)
    refused = charset.refused(line) | lone
    values = {field.name: parsed.getField(field.name) for field in fields}
    # A line that is refused is parsed only to say which columns are concerned; what is in them is dropped.
    suspect = [
        (f"column {name}", sql.contains(sql.to_json(sql.struct(value.alias("it"))), sql.lit(REPLACED)))
        for name, value in values.items()
        if name != corrupt_record
    ]
    cause = sql.coalesce(
        *[
            sql.when(kind, _cause(cause, places, line))
            for kind, cause in ((charset.refused(line), charset.cause), (lone, _LONE_CAUSE))
            for places in (suspect, [("the line", sql.lit(True))])
        ]
    )
    kept = {name: sql.col(quoted(name)).cast(declared.get(name.lower(), types.StringType())) for name in folders}
    records = _decoded_lines(lines, charset).where(sql.btrim(line, sql.lit(" \t\r\n")) != "")
    # To see which column a lone surrogate is in, U+FFFD is put for it.
    shown = sql.when(lone, sql.regexp_replace(_with_simple_escapes(line), _LONE, r"\\ufffd")).otherwise(line)
    return records.withColumn("parsed", sql.from_json(shown, types.StructType(fields), dict(given))).select(
        [
            (sql.when(refused, cause) if name == corrupt_record else sql.when(refused, None))
            .otherwise(value)
            .alias(name)
            for name, value in values.items()
        ]
        + [value.alias(name) for name, value in kept.items()]
    )


def checked_documents(frame: "DataFrame", lines: "DataFrame", charset: Charset, corrupt_record: str) -> "DataFrame":
    """Call all records malformed of those documents of JSON that are not text all through.

    Spark reads a document from its bytes, and says of none of its records where in the file it was.

    Args:
        frame: the records.
        lines: of the files, as bytes; of a wide encoding, the whole files.
        charset: of the files.
        corrupt_record: the name of the column for the text of malformed records.
    """
    line, file = sql.col(LINE), sql.col(_FILE)
    # Where no encoding is named, Spark takes UTF-16 for what it is; that has NUL bytes, and no JSON in UTF-8 has.
    refused, lone = charset.refused(line) | sql.contains(line, sql.lit("\0")), _has_lone(line)
    wrong = _decoded_lines(lines, charset).where(refused | lone)
    found = wrong.select(file, refused).distinct().collect()
    if not found:
        return frame
    record = sql.to_json(sql.struct(*[sql.col(quoted(name)) for name in frame.columns if name != corrupt_record]))
    causes = [
        sql.when(
            file.isin([name for name, its in found if its == kind]),
            _cause(cause, [("the document", sql.lit(True))], record),
        )
        for kind, cause in ((True, charset.cause), (False, _LONE_CAUSE))
    ]
    return frame.withColumn(corrupt_record, sql.coalesce(*causes, sql.col(corrupt_record)))


def _has_lone(text: "Column") -> "Column":
    """Whether JSON has an escape for half of a surrogate pair without the other half; cheap if it has no halves."""
    there = sql.contains(text, sql.lit(r"\ud")) | sql.contains(text, sql.lit(r"\uD"))
    return there & sql.rlike(_with_simple_escapes(text), sql.lit(_LONE))


def _with_simple_escapes(text: "Column") -> "Column":
    r"""Return the same JSON without ``\\``, so that every backslash begins an escape."""
    return sql.replace(text, sql.lit("\\\\"), sql.lit(r"\u005c"))


def _decoded_lines(lines: "DataFrame", charset: Charset) -> "DataFrame":
    with changed_settings(lines.sparkSession, EVERY_CHARSET):
        return lines.withColumn(LINE, charset.decoded(sql.col(LINE).cast("binary")))


# -- both -------------------------------------------------------------------------------------------------------------


def _cause(why: tuple[str, str], places: "list[tuple[str, Column]]", shown: "Column") -> "Column":
    """Return why a record is malformed, and the record; null if none of the conditions on its places holds."""
    named = sql.concat_ws(", ", *[sql.when(wrong, place) for place, wrong in places])
    what, remedy = why
    cause = sql.concat(
        sql.lit(f"{what} in "),
        named,
        sql.lit(" of "),
        sql.col(_FILE),
        sql.lit(f" ({remedy}): "),
        sql.make_valid_utf8(shown),
    )
    return sql.when(named != "", cause)


_MARK = codecs.BOM_UTF8.decode("latin-1")
_FILE = "_metadata.file_path"
_LONE = (
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
"""In JSON in which every backslash begins an escape."""
_LONE_CAUSE = (
    r"lone surrogate (half of a character, such as \ud800)",
    "no text of Postgres can hold it; fix the file",
)
_OF_FILES = ("pathglobfilter", "basepath")
_AS_IT_WAS = {"escape": '"', "ignoreLeadingWhiteSpace": "false", "ignoreTrailingWhiteSpace": "false"}
