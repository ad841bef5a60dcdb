"""Finds CSV records that Spark accepts although it changes a value in them, or swallows other records.

Spark's reader drops commas from decimals, and rounds what does not fit. So decimals are read as text, and parsed here.

If a quote is never closed, Spark silently reads the rest of the file as the text of that field. So each line is
examined alone: depending on what comes before, it begins outside or within quotes, and for both cases we know whether
it ends within quotes. What decides for a file is its last line that ends the same way in both cases, and the number of
lines after it, each of which turns one state into the other. A file that ends within quotes is refused: it was
truncated, or a quote is missing somewhere.

Spark takes the columns from one of the files, and fails in the middle of a load at a file with another header. So the
bytes of every file's header are compared here, and Spark parses each header that differs.
"""

import codecs
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, cast

from txbox_spark.reading.columns import AS_IT_WAS, CORRUPT_RECORD, quoted
from txbox_spark.reading.errors import SourceError
from txbox_spark.reading.files.file_listing import file_of, first_bytes
from txbox_spark.runtime.lazy_imports import Column, DataFrame, SparkSession, StructType, spark_errors, sql, types


def decimals_of(columns: StructType) -> dict[str, "types.DecimalType"]:
    return {field.name: field.dataType for field in columns.fields if isinstance(field.dataType, types.DecimalType)}


def as_text(columns: StructType, names: Collection[str]) -> StructType:
    text = types.StringType()
    fields = [types.StructField(field.name, text) if field.name in names else field for field in columns.fields]
    return types.StructType(fields)


def checked_records(frame: DataFrame, decimals: Mapping[str, "types.DecimalType"]) -> DataFrame:
    """Convert texts to decimals, and mark CSV records as malformed if Spark would change a value in them.

    A record is malformed if a text does not fit its decimal, or if the last field ends with CR: Spark takes the line
    end from the first line of a file, and if other lines end with CR LF, the CR would become part of the event.
    ``decimals`` has the columns that were read as text, with their types.
    """
    in_file = [sql.col(quoted(name)) for name in frame.columns[: frame.columns.index(CORRUPT_RECORD)]]
    if not in_file:
        return frame
    wrong = sql.endswith(in_file[-1].cast("string"), sql.lit("\r"))
    values = {}
    for name, type_ in decimals.items():
        fits = _fits(sql.col(quoted(name)), type_)
        values[name] = sql.when(fits, sql.col(quoted(name)).try_cast(type_))
        wrong = wrong | (sql.col(quoted(name)).isNotNull() & ~fits)
    # Spark does not give us the line itself, so write one like it.
    line = sql.when(wrong, sql.to_csv(sql.struct(*in_file), AS_IT_WAS))
    values[CORRUPT_RECORD] = sql.coalesce(sql.col(CORRUPT_RECORD), line)
    return frame.select([values.get(name, sql.col(quoted(name))).alias(name) for name in frame.columns])


def _fits(text: Column, type_: "types.DecimalType") -> Column:
    """Return Spark's expression for whether a text is a decimal that the type holds to its last digit.

    Spark's casts round, so the digits are counted. Without an exponent, one pattern does it, which is fast. With one,
    it counts the digits between leading and trailing zeros, and takes the power of ten of the last of them.
    """
    room = type_.precision - type_.scale
    plain = rf"^[+-]?(?=\.?[0-9])0*[0-9]{{0,{room}}}(?:\.[0-9]{{0,{type_.scale}}}0*)?\z"
    whole, fraction, exponent = (sql.regexp_extract(text, _WITH_EXPONENT, group) for group in (1, 2, 3))
    from_first = sql.regexp_replace(sql.concat(whole, fraction), "^0+", "")
    digits = sql.regexp_replace(from_first, "0+$", "")
    last = exponent.try_cast("int") - sql.length(fraction) + sql.length(from_first) - sql.length(digits)
    holds = ((digits == "") | (last >= -type_.scale)) & (last + sql.greatest(sql.length(digits), sql.lit(1)) <= room)
    return (
        sql.when(sql.rlike(text, sql.lit(plain)), sql.lit(True))
        .when(sql.rlike(text, sql.lit(_WITH_EXPONENT)), holds)
        .otherwise(sql.lit(False))
    )


# The exponent has a limit, because Spark would calculate for ever with a huge one.
_WITH_EXPONENT = r"^[+-]?(?=\.?[0-9])([0-9]*)(?:\.([0-9]*))?[eE]([+-]?[0-9]{1,4})\z"


CSV_LINE = "_line"


class Quoting(NamedTuple):
    """How CSV fields are quoted.

    Attributes:
        quote: the quote character.
        opens: a pattern for lines that begin outside quotes and end within.
        stays: a pattern for lines that begin within quotes and end within.
    """

    quote: str
    opens: str
    stays: str


def quoting_of(given: Mapping[str, str], separator: str) -> Quoting | None:
    """Return how Spark finds quoted fields with these options of its reader; None if quotes have another meaning.

    The patterns do what Spark's parser (univocity) does, for lines that it does not refuse itself. A quote opens a
    field only at the field's beginning, and blanks may follow the closing quote. ``separator`` separates fields.
    """
    options = {name.lower(): value for name, value in given.items()}
    quote, escape = options.get("quote", '"'), options.get("escape", "\\") or "\0"
    escapes_escape = options.get("chartoescapequoteescaping") or escape
    strict = options.get("unescapedquotehandling", "").upper() == "RAISE_ERROR"
    if not strict or len(quote) != 1 or len(escape) != 1 or escapes_escape != escape:
        return None
    q, e, s = _literal(quote), _literal(escape), _literal(separator)
    # All repetitions are possessive, so that each line is scanned once, and even a long one needs no stack.
    plain = f"[^{q}{e}]*+"
    text = f"{plain}(?:{e}{q}{plain})*+" if quote == escape else f"{plain}(?:{e}[{e}{q}]?+{plain})*+"
    end = q if quote == escape else f"{q}++"
    blanks = rf"(?:(?!{s})[\u0000-\u0009\u000b-\u0020])*+"
    unquoted = f"[^{s}]*+" if len(separator) == 1 else rf"(?:(?!{s})[\s\S])*+"
    leading = blanks if options.get("ignoreleadingwhitespace", "").lower() == "true" else ""
    # If lines end with CR LF, a single LF ends a record before a field or after quotes; elsewhere it is text.
    field = rf"(?:\n|{q}{text}{end}{blanks}(?:{s}|\n)|(?!{q}){unquoted}{s})"
    opens = rf"(?:{leading}{field})*+{leading}{q}{text}\z"
    comment = f"(?!{_literal(options['comment'])})" if options.get("comment") else ""
    return Quoting(quote, rf"\A{comment}{opens}", rf"\A{text}(?:\z|{end}{blanks}(?:{s}|\n){opens})")


def refuse_unclosed(lines: DataFrame, quoting: Quoting, *, whole: bool, shown: Callable[[str], str] = str) -> None:
    """Raise ``SourceError`` if a file ends within quotes.

    Args:
        lines: in the column ``CSV_LINE``, the lines as Spark's CSV reader sees them; those of a file are consecutive.
        quoting: how fields are quoted.
        whole: whether a quoted field may hold line breaks; if not, each line is parsed alone.
        shown: converts a line that was read as bytes for an error.
    """
    text, file = sql.col(CSV_LINE), file_of(lines).alias(_FILE)
    with_quotes = lines.where(sql.contains(text, sql.lit(quoting.quote)))
    opens, stays = (sql.rlike(text, sql.lit(pattern)) for pattern in (quoting.opens, quoting.stays))
    if not whole:
        open_lines = with_quotes.where(opens)
        first = open_lines.select(file, sql.left(text, sql.lit(_SHOWN))).head()
        if first is not None:
            raise SourceError(
                f"{first[0]} has a quote that is not closed on its line, and with multiLine=false each line is read by "
                f"itself; leave multiLine out, or {_PLAIN_QUOTES}. Such lines in all files: {open_lines.count():,}; "
                f"one begins with {shown(first[1])}"
            )
        return
    ends = sql.when(opens, sql.when(stays, _WITHIN).otherwise(_TURNED)).otherwise(sql.when(~stays, _OUTSIDE))
    # An array, because Spark would compute a column again for a condition on it.
    known = sql.explode(sql.filter(sql.array(ends), lambda end: end.isNotNull())).alias(_ENDS)
    numbered = with_quotes.select(file, sql.left(text, sql.lit(_SHOWN)).alias(CSV_LINE), known).withColumn(
        _NUMBER, sql.monotonically_increasing_id()
    )
    # Numbers are consecutive in a file: every line after the last fixed one turns one state into the other.
    is_fixed = sql.col(_ENDS) != _TURNED
    last_fixed = sql.max(sql.when(is_fixed, 2 * sql.col(_NUMBER) + sql.col(_ENDS)))
    first_number, last = sql.min(_NUMBER), sql.max(_NUMBER)
    turned = sql.coalesce(last - sql.shiftright(last_fixed, 1), last - first_number + 1)
    within = (sql.coalesce(last_fixed, sql.lit(0)) + turned) % 2 == 1
    found = numbered.groupBy(_FILE).agg(within.alias("within"), last.alias(_NUMBER)).where("within")
    unclosed = sorted((row[_FILE], row[_NUMBER]) for row in found.collect())
    if unclosed:
        name, number = unclosed[0]
        [[begin]] = numbered.where((sql.col(_FILE) == name) & (sql.col(_NUMBER) == number)).select(CSV_LINE).collect()
        raise SourceError(
            f"{name} ends within quotes, so that Spark would read the rest of it as one field: a quote is not closed, "
            f"it seems on the line that begins with {shown(begin)}; close it, send the file again if it was cut off, "
            f"or {_PLAIN_QUOTES}. Such files: {len(unclosed):,}"
        )


def _literal(text: str) -> str:
    return "".join(f"\\u{ord(character):04x}" for character in text)


_FILE, _ENDS, _NUMBER = "file", "ends", "number"
_OUTSIDE, _WITHIN, _TURNED = 0, 1, 2
"""How a line ends: outside or within quotes, however it begins; or the opposite of how it begins."""
_SHOWN = 100
_PLAIN_QUOTES = "give the option quote= (empty) if quotes are plain text"


@dataclass(frozen=True, slots=True)
class Header:
    """A header, and the files that have it.

    Attributes:
        names: the column names; a column without a name is called ``_c`` and its position, as in Spark.
        unnamed: what Spark reads where a name is missing, by the column's position.
        files: their names from ``file_of``; empty if all files have this header.
        shown: one of the files.
    """

    names: tuple[str, ...]
    unnamed: Mapping[int, str]
    files: tuple[str, ...]
    shown: str

    def ordered(self, columns: StructType, folders: Collection[str], of: str) -> StructType:
        """Return the columns in the order of this header, followed by the folders' columns.

        Args:
            columns: the columns of all files.
            folders: the columns that come from folder names.
            of: what has these columns, in words.

        Raises:
            SourceError: the header lacks one of the columns, has an extra one, or has one twice.
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
        """Read the files with this header. ``columns`` begins with the header's columns, in their order."""
        renamed = {token: columns.names[place] for place, token in self.unnamed.items()}
        fields = [
            types.StructField(self.unnamed.get(place, field.name), field.dataType)
            for place, field in enumerate(columns.fields)
        ]
        frame = load(types.StructType(fields))
        if self.files:
            # Spark does not even open the other files.
            frame = frame.where(file_of(frame).isin(list(self.files)))
        return frame.toDF(*[renamed.get(name, name) for name in frame.columns]) if renamed else frame


def _listed(names: Iterable[str]) -> str:
    return ", ".join(
        f"{name} (so Spark calls a column without a name)" if _UNNAMED.fullmatch(name) else name for name in names
    )


def files_by_header(
    spark: SparkSession, files: DataFrame, *, comment: bytes, quote: bytes
) -> dict[bytes, list[tuple[str, str]]]:
    """Return the files by the bytes of their headers, each file as its path and its name from ``file_of``.

    Empty files, and files that cannot be opened, have no header; they are added to the end of the first header's files.
    If there is no header at all, or only one file, which is not opened, the key is empty.

    Args:
        spark: the Spark session.
        files: a listing in the format ``binaryFile``.
        comment: how comment lines begin, which are skipped; empty if there are none.
        quote: the quote around a name that may hold a line break; empty if there is none.
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
    first = first_bytes(spark, _FIRST_BYTES)

    def begin(path: str) -> bytes:
        try:
            return first(path).removeprefix(codecs.BOM_UTF8)
        except spark_errors():  # Spark reports or skips the file when it reads it
            return b""

    return begin


def as_pattern(path: str) -> str:
    """Return a path, escaped for Hadoop's path patterns."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


_UNNAMED = re.compile("_c[0-9]+")
_FIRST_BYTES = 16_384
"""How much of a file is read to compare its header with others."""
_THREADS = 16
