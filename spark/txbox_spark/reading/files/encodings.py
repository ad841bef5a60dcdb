r"""Decodes the text of files: bytes that are invalid in the files' encoding are reported, and never replaced.

Java replaces bytes that it cannot decode with U+FFFD, and so do Spark's readers: two ids become one. Afterwards nobody
can tell this from a U+FFFD that was in the file. So the lines are checked as bytes first, in one pass. If every line is
UTF-8, Spark's readers read the files as usual. Otherwise the readers must not decode:

- CSV is read as ISO-8859-1, in which every byte is a character, and each field is decoded separately.
- JSON is read as lines of bytes, and only lines that can be decoded are parsed.

In an encoding other than UTF-8, U+FFFD looks the same as invalid bytes, so both are refused.

JSON has another way to write something that is not text: an escape such as ``\ud800``, one half of a surrogate pair
without the other half. Java replaces it with "?". So the lines are searched for such escapes, too.
"""

import codecs
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from txbox_spark.reading.columns import AS_IT_WAS, CORRUPT_RECORD, quoted
from txbox_spark.reading.errors import EncodingError
from txbox_spark.reading.files.file_listing import file_of, first_bytes
from txbox_spark.runtime.jobs import changed_settings
from txbox_spark.runtime.lazy_imports import Column, DataFrame, SparkSession, StructType, sql, types

REPLACED = "\ufffd"
"""What Java replaces invalid bytes with."""


@dataclass(frozen=True, slots=True)
class Charset:
    name: str  # in Java
    codec: str  # its name in Python

    @property
    def is_utf8(self) -> bool:
        return self.name == "UTF-8"

    @property
    def is_wide(self) -> bool:
        """Whether a comma or a line break takes more than one byte."""
        return self.name.startswith("UTF-16")

    @property
    def cause(self) -> tuple[str, str]:
        """Why a record in another encoding is malformed, and what to do."""
        return f"not {self.name}", REMEDY

    def decoded(self, data: Column) -> Column:
        """Return bytes as text. Invalid bytes stay as they are in UTF-8, and become U+FFFD in other encodings."""
        return data.cast("string") if self.is_utf8 else sql.decode(data, self.name)

    def refused(self, text: Column) -> Column:
        """Return whether a text from ``decoded`` had invalid bytes."""
        return ~sql.is_valid_utf8(text) if self.is_utf8 else sql.contains(text, sql.lit(REPLACED))

    def in_latin1(self, text: str) -> str:
        """Return how a text looks if each of its bytes is read as one character."""
        try:
            return text.encode(self.codec).decode("latin-1")
        except UnicodeError as error:
            raise EncodingError(f"{text!r} cannot be written in {self.name}") from error


def charset_named(spark: SparkSession, name: str) -> Charset:
    """Return the encoding with this name in Python, if Java has the same encoding.

    Raises:
        EncodingError: Python or Java does not have it, or Java reads it differently.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    jvm: Any = spark._jvm  # noqa: SLF001 pyspark has no other way to ask for its JVM
    try:
        codec = codecs.lookup(name).name.removesuffix("-sig")
        plain = _ASCII.encode(codec).decode("latin-1")  # this fails for Python's codecs that are not for text
        called = next(
            one
            for pattern, to in _IN_JAVA
            if jvm.java.nio.charset.Charset.isSupported(one := re.sub(pattern, to, codec))
        )
    except (LookupError, ValueError, StopIteration, Py4JJavaError, PySparkException) as error:
        raise EncodingError(f"encoding {name!r} is unknown; use one such as latin1, cp1252 or utf-16") from error
    charset = Charset(str(jvm.java.nio.charset.Charset.forName(called).name()), codec)
    if plain != _ASCII and not charset.is_wide and not charset.name.startswith("UTF-32"):
        # We search for line breaks, commas and braces by their ASCII bytes.
        raise EncodingError(f"in {charset.name}, ASCII has other bytes; convert the files to UTF-8 first")
    if charset.name.startswith("UTF-32"):
        # In UTF-32, Java accepts a lone surrogate as a character, and then replaces it with "?".
        raise EncodingError(
            f"{charset.name} cannot be read so that nothing is changed; convert the files to UTF-8 first"
        )
    return charset


_ASCII = "".join(map(chr, range(128)))
_IN_JAVA = (
    # cp932 is a Windows encoding in Python, but one of IBM's, with other characters, in Java.
    (r"^cp(?=9\d\d$)", "windows-"),
    (r"^", ""),
    (r"-(?=[lb]e$)", ""),
    (r"^mac-", "x-mac"),
)
"""Replacements that turn Python's name of an encoding into one that Java may know."""
REMEDY = "in another encoding? name it: encoding, --encoding"

EVERY_CHARSET = {"spark.sql.legacy.javaCharsets": "true", "spark.sql.legacy.codingErrorAction": "true"}
"""Settings with which Spark's ``decode`` accepts every Java charset, and replaces invalid bytes."""


LINE = "value"
"""Spark's name for the column with a line of a text file."""

OF_DOCUMENTS = ("UTF-8", "UTF-16", "UTF-16LE", "UTF-16BE", "ISO-8859-1", "US-ASCII")
"""The encodings, by their Java names, in which Spark reads a JSON document."""


def all_text(lines: DataFrame, quote: bytes) -> tuple[bool, bool]:
    """Return whether every line is UTF-8, and whether any line has a quote, in one pass."""
    has_quote = sql.contains(sql.col(LINE).cast("binary"), sql.lit(quote))
    text, quotes = lines.agg(sql.bool_and(sql.is_valid_utf8(LINE)), sql.bool_or(has_quote)).collect()[0]
    return text is not False, quotes is True


def all_json(lines: DataFrame, wrong: Column) -> bool:
    """Return whether every line is UTF-8, has no lone surrogate and is not ``wrong``, in one pass."""
    return _none(lines, ~sql.is_valid_utf8(LINE) | _has_lone(sql.col(LINE)) | wrong)


def _none(lines: DataFrame, wrong: Column) -> bool:
    return lines.where(wrong).select(sql.lit(1)).isEmpty()


def read_as_bytes(charset: Charset, given: Mapping[str, str]) -> dict[str, str]:
    """Return options with which Spark's reader reads every byte as one character.

    Raises:
        EncodingError: one of the options cannot be written in this encoding.
    """
    options = {name: value if name.lower() in _OF_FILES else charset.in_latin1(value) for name, value in given.items()}
    return {**options, "encoding": "ISO-8859-1"}


def with_true_names(header: StructType, charset: Charset, folders: Collection[str], *, as_bytes: bool) -> StructType:
    """Return the columns of a header with their decoded names, without the folders' columns.

    Raises:
        EncodingError: a name is invalid in this encoding.
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


def with_mark(spark: SparkSession, files: DataFrame) -> dict[str, bool]:
    """Return whether each file begins with the UTF-8 byte order mark, by its name from ``file_of``.

    ``files`` is a listing in the format ``binaryFile``.
    """
    begin = first_bytes(spark, len(codecs.BOM_UTF8))
    return {file: begin(path) == codecs.BOM_UTF8 for path, file in files.select("path", file_of(files)).collect()}


def csv_records(
    load: Callable[[StructType], DataFrame],
    charset: Charset,
    columns: StructType,
    folders: Collection[str],
    marked: Mapping[str, bool],
) -> DataFrame:
    """Return CSV records decoded field by field. If a field is invalid, the record's text is in ``CORRUPT_RECORD``.

    Args:
        load: reads the files with the options of ``read_as_bytes``.
        charset: the files' encoding.
        columns: the columns with their decoded names, and ``CORRUPT_RECORD``.
        folders: the columns that come from folder names.
        marked: which files begin with a byte order mark that is read as part of their header.
    """
    apart = {name.lower() for name in (*folders, CORRUPT_RECORD)}
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
            # Spark does not even open the other files.
            frame = frame.where(file_of(frame).isin([file for file, one in marked.items() if one == mark]))
        found.append(_decoded(frame, charset, true_names, apart))
    return found[0] if len(found) == 1 else found[0].union(found[1])


def _decoded(frame: DataFrame, charset: Charset, true_names: Mapping[str, str], apart: Collection[str]) -> DataFrame:
    def decoded(value: Column) -> Column:
        return charset.decoded(sql.encode(value, "ISO-8859-1"))

    values, texts, in_file = {}, {}, []
    with changed_settings(frame.sparkSession, EVERY_CHARSET):
        for field in frame.schema.fields:
            name, value = true_names.get(field.name, field.name), sql.col(quoted(field.name))
            if name.lower() not in apart:
                in_file.append(value.alias(name))
                if isinstance(field.dataType, types.StringType):
                    value = texts[name] = decoded(value)
            values[name] = value
        line = decoded(sql.to_csv(sql.struct(*in_file), AS_IT_WAS))
        cause = _cause(charset.cause, _refused_columns(charset, texts), line, file_of(frame))
        # A record that Spark could not read is only shown, so replacing invalid bytes is fine.
        values[CORRUPT_RECORD] = sql.coalesce(cause, sql.make_valid_utf8(decoded(values[CORRUPT_RECORD])))
        return frame.select([value.alias(name) for name, value in values.items()])


def without_replaced(frame: DataFrame, charset: Charset, folders: Collection[str]) -> DataFrame:
    """Mark records that Spark has decoded as malformed if a text has U+FFFD."""
    apart = {*folders, CORRUPT_RECORD}
    fields = {field.name: field.dataType for field in frame.schema.fields if field.name not in apart}
    texts = {name: sql.col(quoted(name)) for name, type_ in fields.items() if isinstance(type_, types.StringType)}
    line = sql.to_csv(sql.struct(*[sql.col(quoted(name)) for name in fields]), AS_IT_WAS)
    cause = _cause(charset.cause, _refused_columns(charset, texts), line, file_of(frame))
    return frame.withColumn(CORRUPT_RECORD, sql.coalesce(cause, sql.col(CORRUPT_RECORD)))


def _refused_columns(charset: Charset, texts: Mapping[str, Column]) -> list[tuple[str, Column]]:
    return [(f"column {name}", charset.refused(text)) for name, text in texts.items()]


def json_columns(lines: DataFrame, charset: Charset, given: Mapping[str, str]) -> StructType:
    """Return the columns of the JSON lines that are valid in their encoding, and have no lone surrogate."""
    wrong = charset.refused(sql.col(LINE)) | _has_lone(sql.col(LINE))
    text = decoded_lines(lines, charset).where(~wrong).select(LINE)
    session: Any = lines.sparkSession
    # pyspark would pass the lines through Python to find their columns.
    jvm, reader = session._jvm, session._jsparkSession.read().options(dict(given))  # noqa: SLF001
    strings = getattr(text._jdf, "as")(jvm.org.apache.spark.sql.Encoders.STRING())  # noqa: SLF001
    return types.StructType.fromJson(json.loads(str(reader.json(strings).schema().json())))


def json_records(lines: DataFrame, charset: Charset, given: Mapping[str, str], columns: StructType) -> DataFrame:
    """Parse lines of JSON. If a line is not valid text, ``CORRUPT_RECORD`` has the cause, and all else is null.

    ``lines`` has the files' lines as bytes, and the columns that come from folder names. ``given`` has options of
    Spark's reader.
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
    # A refused line is parsed only to find out which columns are affected; their values are dropped.
    suspect = [
        (f"column {name}", sql.contains(sql.to_json(sql.struct(value.alias("it"))), sql.lit(REPLACED)))
        for name, value in values.items()
        if name != CORRUPT_RECORD
    ]
    cause = sql.coalesce(
        *[
            sql.when(kind, _cause(cause, places, line, file_of(lines)))
            for kind, cause in ((charset.refused(line), charset.cause), (lone, _LONE_CAUSE))
            for places in (suspect, [("the line", sql.lit(True))])
        ]
    )
    kept = {name: sql.col(quoted(name)).cast(declared.get(name.lower(), types.StringType())) for name in folders}
    records = decoded_lines(lines, charset).where(sql.btrim(line, sql.lit(" \t\r\n")) != "")
    # Replace a lone surrogate with U+FFFD, to see which column it is in.
    shown = sql.when(lone, sql.regexp_replace(_with_simple_escapes(line), _LONE, r"\\ufffd")).otherwise(line)
    return records.withColumn("parsed", sql.from_json(shown, types.StructType(fields), dict(given))).select(
        [
            (sql.when(refused, cause) if name == CORRUPT_RECORD else sql.when(refused, None))
            .otherwise(value)
            .alias(name)
            for name, value in values.items()
        ]
        + [value.alias(name) for name, value in kept.items()]
    )


def checked_documents(frame: DataFrame, lines: DataFrame, charset: Charset) -> DataFrame:
    """Mark all records of a JSON document as malformed if it is not all valid text.

    Spark does not say where in the document a record is. ``lines`` has the whole files, as bytes.
    """
    line, file = sql.col(LINE), file_of(frame)
    # If no encoding is named, Spark detects UTF-16. It has NUL bytes, and JSON in UTF-8 never has.
    refused, lone = charset.refused(line) | sql.contains(line, sql.lit("\0")), _has_lone(line)
    wrong = decoded_lines(lines, charset).where(refused | lone)
    found = wrong.select(file_of(lines), refused).distinct().collect()
    if not found:
        return frame
    record = sql.to_json(sql.struct(*[sql.col(quoted(name)) for name in frame.columns if name != CORRUPT_RECORD]))
    causes = [
        sql.when(
            file.isin([name for name, its in found if its == kind]),
            _cause(cause, [("the document", sql.lit(True))], record, file),
        )
        for kind, cause in ((True, charset.cause), (False, _LONE_CAUSE))
    ]
    return frame.withColumn(CORRUPT_RECORD, sql.coalesce(*causes, sql.col(CORRUPT_RECORD)))


def _has_lone(text: Column) -> Column:
    """Return whether JSON has an escape for half a surrogate pair without the other half.

    This is cheap if there are no such escapes at all.
    """
    there = sql.contains(text, sql.lit(r"\ud")) | sql.contains(text, sql.lit(r"\uD"))
    return there & sql.rlike(_with_simple_escapes(text), sql.lit(_LONE))


def _with_simple_escapes(text: Column) -> Column:
    r"""Return the same JSON without ``\\``, so that every backslash begins an escape."""
    return sql.replace(text, sql.lit("\\\\"), sql.lit(r"\u005c"))


def decoded_lines(lines: DataFrame, charset: Charset) -> DataFrame:
    """Return lines or whole files as text, decoded as by ``Charset.decoded``."""
    with changed_settings(lines.sparkSession, EVERY_CHARSET):
        return lines.withColumn(LINE, charset.decoded(sql.col(LINE).cast("binary")))


def _cause(why: tuple[str, str], places: list[tuple[str, Column]], shown: Column, file: Column) -> Column:
    """Return why a record is malformed, followed by the record; null if no condition in ``places`` holds."""
    named = sql.concat_ws(", ", *[sql.when(wrong, place) for place, wrong in places])
    what, remedy = why
    cause = sql.concat(
        sql.lit(f"{what} in "),
        named,
        sql.lit(" of "),
        file,
        sql.lit(f" ({remedy}): "),
        sql.make_valid_utf8(shown),
    )
    return sql.when(named != "", cause)


_MARK = codecs.BOM_UTF8.decode("latin-1")
_LONE = (
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
"""Matches in JSON in which every backslash begins an escape."""
_LONE_CAUSE = (
    r"lone surrogate (half of a character, such as \ud800)",
    "no text of Postgres can hold it; fix the file",
)
_OF_FILES = ("pathglobfilter", "basepath")
