r"""Text of files: bytes that are not in the files' encoding are reported, and never replaced.

Java puts U+FFFD in place of bytes that it cannot decode, and so do Spark's readers: two ids become one. Afterwards that
looks the same as a U+FFFD that was in the file. So the lines are checked as bytes first, in one pass. Files in which
every line is UTF-8 are read by Spark's readers as usual. For others the readers are kept from decoding:

- CSV is read as ISO-8859-1, in which every byte is a character, and each field is decoded by itself.
- JSON is read as lines of bytes, and only those that can be decoded are parsed.

In an encoding other than UTF-8, U+FFFD looks the same as bytes that are not in it, so both are refused.

JSON has another way to write what is not text: an escape such as ``\ud800``, one half of a surrogate pair without the
other half. Java puts "?" for it. So such escapes are looked for in the lines, too.
"""

import codecs
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from txbox_spark.reading.columns import AS_IT_WAS, CORRUPT_RECORD, quoted
from txbox_spark.reading.errors import EncodingError
from txbox_spark.reading.files.file_listing import file_of
from txbox_spark.runtime.jobs import changed_settings
from txbox_spark.runtime.lazy_imports import Column, DataFrame, SparkSession, StructType, sql, types

REPLACED = "\ufffd"
"""What Java puts for bytes that are not in an encoding."""


@dataclass(frozen=True, slots=True)
class Charset:
    """An encoding."""

    name: str  # as Java calls it
    codec: str  # as Python calls it

    @property
    def is_utf8(self) -> bool:
        """Whether Spark can check the bytes as they are."""
        return self.name == "UTF-8"

    @property
    def is_wide(self) -> bool:
        """Whether a comma, or a line break, is more than one byte."""
        return self.name.startswith("UTF-16")

    @property
    def cause(self) -> tuple[str, str]:
        """Why a record that is not in it is malformed, and what to do."""
        return f"not {self.name}", REMEDY

    def decoded(self, data: Column) -> Column:
        """Return bytes as text. What is not UTF-8 stays as it is; in another encoding it becomes U+FFFD."""
        return data.cast("string") if self.is_utf8 else sql.decode(data, self.name)

    def refused(self, text: Column) -> Column:
        """Whether a text from ``decoded`` has something that is not in this encoding."""
        return ~sql.is_valid_utf8(text) if self.is_utf8 else sql.contains(text, sql.lit(REPLACED))

    def in_latin1(self, text: str) -> str:
        """Return a text as it looks where each of its bytes is read as one character."""
        try:
            return text.encode(self.codec).decode("latin-1")
        except UnicodeError as error:
            raise EncodingError(f"{text!r} cannot be written in {self.name}") from error


def charset_named(spark: SparkSession, name: str) -> Charset:
    """Find an encoding by Python's name for it, if Java has the same encoding.

    Raises ``EncodingError``: Python or Java does not have it, or Java reads it otherwise.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    jvm: Any = spark._jvm  # noqa: SLF001 pyspark has no other way to ask for its JVM
    try:
        codec = codecs.lookup(name).name.removesuffix("-sig")
        plain = _ASCII.encode(codec).decode("latin-1")  # not all that Python looks up is for text
        called = next(
            one
            for pattern, to in _IN_JAVA
            if jvm.java.nio.charset.Charset.isSupported(one := re.sub(pattern, to, codec))
        )
    except (LookupError, ValueError, StopIteration, Py4JJavaError, PySparkException) as error:
        raise EncodingError(f"encoding {name!r} is unknown; use one such as latin1, cp1252 or utf-16") from error
    charset = Charset(str(jvm.java.nio.charset.Charset.forName(called).name()), codec)
    if plain != _ASCII and not charset.is_wide and not charset.name.startswith("UTF-32"):
        # Line breaks, commas and braces are looked for as what they are in ASCII.
        raise EncodingError(f"in {charset.name}, ASCII has other bytes; convert the files to UTF-8 first")
    if charset.name.startswith("UTF-32"):
        # In it, Java takes a lone surrogate for a character, and then puts "?" for it.
        raise EncodingError(
            f"{charset.name} cannot be read so that nothing is changed; convert the files to UTF-8 first"
        )
    return charset


_ASCII = "".join(map(chr, range(128)))
_IN_JAVA = (
    # cp932 is Windows' to Python, and one of IBM's to Java, with other characters.
    (r"^cp(?=9\d\d$)", "windows-"),
    (r"^", ""),
    (r"-(?=[lb]e$)", ""),
    (r"^mac-", "x-mac"),
)
"""How to get from Python's name of an encoding to one that Java may know: what is replaced by what."""
REMEDY = "in another encoding? name it: encoding, --encoding"

EVERY_CHARSET = {"spark.sql.legacy.javaCharsets": "true", "spark.sql.legacy.codingErrorAction": "true"}
"""Settings by which Spark's ``decode`` takes every charset of Java's, and replaces what is not in it."""


LINE = "value"
"""What Spark calls the column with a line of a text file."""

OF_DOCUMENTS = ("UTF-8", "UTF-16", "UTF-16LE", "UTF-16BE", "ISO-8859-1", "US-ASCII")
"""The encodings, as Java calls them, in which Spark reads a document of JSON."""


def all_text(lines: DataFrame, quote: bytes) -> tuple[bool, bool]:
    """Return whether every line is UTF-8, and whether one has a quote; one pass."""
    has_quote = sql.contains(sql.col(LINE).cast("binary"), sql.lit(quote))
    text, quotes = lines.agg(sql.bool_and(sql.is_valid_utf8(LINE)), sql.bool_or(has_quote)).collect()[0]
    return text is not False, quotes is True


def all_json(lines: DataFrame, wrong: Column) -> bool:
    """Return whether every line is UTF-8, has no lone surrogate, and is not wrong in another way; one pass."""
    return _none(lines, ~sql.is_valid_utf8(LINE) | _has_lone(sql.col(LINE)) | wrong)


def _none(lines: DataFrame, wrong: Column) -> bool:
    return lines.where(wrong).select(sql.lit(1)).isEmpty()


def read_as_bytes(charset: Charset, given: Mapping[str, str]) -> dict[str, str]:
    """Return options of Spark's reader by which every byte is read as one character.

    Raises ``EncodingError``: one of the options cannot be written in this encoding.
    """
    options = {name: value if name.lower() in _OF_FILES else charset.in_latin1(value) for name, value in given.items()}
    return {**options, "encoding": "ISO-8859-1"}


def with_true_names(header: StructType, charset: Charset, folders: Collection[str], *, as_bytes: bool) -> StructType:
    """Return the columns of a header, without those of folders, by their names in its encoding.

    Raises ``EncodingError``: a name is not in this encoding.
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
    """Return whether each file begins with the byte order mark of UTF-8, by what ``file_of`` says.

    ``files`` are as Spark lists them in the format ``binaryFile``.
    """
    jvm: Any = spark._jvm  # noqa: SLF001 pyspark has no other way to open a file of Hadoop's
    hadoop: Any = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    compression = jvm.org.apache.hadoop.io.compress.CompressionCodecFactory(hadoop)
    found = {}
    for path, file in files.select("path", file_of(files)).collect():
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
    load: Callable[[StructType], DataFrame],
    charset: Charset,
    columns: StructType,
    folders: Collection[str],
    marked: Mapping[str, bool],
) -> DataFrame:
    """Decode CSV field by field. A record with a field that is not in its encoding has its text in ``CORRUPT_RECORD``.

    Args:
        load: reads the files with the options of ``read_as_bytes``.
        charset: of the files.
        columns: with their true names, and ``CORRUPT_RECORD``.
        folders: the columns that come from names of folders.
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
            # Of the others, Spark does not even open a file.
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
        # What Spark could not read is only shown.
        values[CORRUPT_RECORD] = sql.coalesce(cause, sql.make_valid_utf8(decoded(values[CORRUPT_RECORD])))
        return frame.select([value.alias(name) for name, value in values.items()])


def without_replaced(frame: DataFrame, charset: Charset, folders: Collection[str]) -> DataFrame:
    """Mark records as malformed that Spark has decoded, and that have U+FFFD in a text."""
    apart = {*folders, CORRUPT_RECORD}
    fields = {field.name: field.dataType for field in frame.schema.fields if field.name not in apart}
    texts = {name: sql.col(quoted(name)) for name, type_ in fields.items() if isinstance(type_, types.StringType)}
    line = sql.to_csv(sql.struct(*[sql.col(quoted(name)) for name in fields]), AS_IT_WAS)
    cause = _cause(charset.cause, _refused_columns(charset, texts), line, file_of(frame))
    return frame.withColumn(CORRUPT_RECORD, sql.coalesce(cause, sql.col(CORRUPT_RECORD)))


def _refused_columns(charset: Charset, texts: Mapping[str, Column]) -> list[tuple[str, Column]]:
    return [(f"column {name}", charset.refused(text)) for name, text in texts.items()]


def json_columns(lines: DataFrame, charset: Charset, given: Mapping[str, str]) -> StructType:
    """Find the columns of the lines of JSON that are in their encoding, and have no lone surrogate."""
    wrong = charset.refused(sql.col(LINE)) | _has_lone(sql.col(LINE))
    text = decoded_lines(lines, charset).where(~wrong).select(LINE)
    session: Any = lines.sparkSession
    # pyspark's own way from lines to columns leads through Python.
    jvm, reader = session._jvm, session._jsparkSession.read().options(dict(given))  # noqa: SLF001
    strings = getattr(text._jdf, "as")(jvm.org.apache.spark.sql.Encoders.STRING())  # noqa: SLF001
    return types.StructType.fromJson(json.loads(str(reader.json(strings).schema().json())))


def json_records(lines: DataFrame, charset: Charset, given: Mapping[str, str], columns: StructType) -> DataFrame:
    """Parse lines of JSON. Of one that is not all text, the cause is in ``CORRUPT_RECORD``, and all else is null.

    ``lines`` are the files' as bytes, with the columns that come from names of folders; ``given`` are options of
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
    # A line that is refused is parsed only to say which columns are concerned; what is in them is dropped.
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
    # To see which column a lone surrogate is in, U+FFFD is put for it.
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
    """Mark all records as malformed of documents of JSON that are not all text: Spark tells no record's place in them.

    ``lines`` are the whole files, as bytes.
    """
    line, file = sql.col(LINE), file_of(frame)
    # Where no encoding is named, Spark takes UTF-16 for what it is; that has NUL bytes, and no JSON in UTF-8 has.
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
    """Whether JSON has an escape for half of a surrogate pair without the other half; cheap if it has no halves."""
    there = sql.contains(text, sql.lit(r"\ud")) | sql.contains(text, sql.lit(r"\uD"))
    return there & sql.rlike(_with_simple_escapes(text), sql.lit(_LONE))


def _with_simple_escapes(text: Column) -> Column:
    r"""Return the same JSON without ``\\``, so that every backslash begins an escape."""
    return sql.replace(text, sql.lit("\\\\"), sql.lit(r"\u005c"))


def decoded_lines(lines: DataFrame, charset: Charset) -> DataFrame:
    """Return lines, or whole files, as text; what is not in their encoding is replaced."""
    with changed_settings(lines.sparkSession, EVERY_CHARSET):
        return lines.withColumn(LINE, charset.decoded(sql.col(LINE).cast("binary")))


def _cause(why: tuple[str, str], places: list[tuple[str, Column]], shown: Column, file: Column) -> Column:
    """Return why a record is malformed, and the record; null if none of the conditions on its places holds."""
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
"""In JSON in which every backslash begins an escape."""
_LONE_CAUSE = (
    r"lone surrogate (half of a character, such as \ud800)",
    "no text of Postgres can hold it; fix the file",
)
_OF_FILES = ("pathglobfilter", "basepath")
