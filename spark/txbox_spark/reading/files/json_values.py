"""JSON texts that hold more than one value, which Spark's parser reads up to the end of the first.

Two events on one line, as some services write them (``{"id":1}{"id":2}``), a comma behind each line, a document of JSON
lines that is read with ``multiLine``: Spark takes the first value, and the rest is lost without a word. Workers park
such a message. Nothing of such files is loaded.
"""

from collections.abc import Callable, Mapping

from txbox_spark.reading.errors import SourceError
from txbox_spark.reading.files.encodings import LINE
from txbox_spark.reading.files.file_listing import file_of
from txbox_spark.runtime.lazy_imports import Column, DataFrame, sql

_MARK = "\ufeff"
_DEPTH = "maxnestingdepth"
_SHOWN = 100
"""Characters of a text that an error shows."""


def has_more(text: Column, given: Mapping[str, str]) -> Column:
    """Whether there is more than blanks behind the first JSON value of a text.

    Args:
        text: a line, or a document.
        given: options of Spark's reader, some of which allow what is not JSON.
    """
    # Nearly all lines of flat events: the first "}" is their last byte. That takes a tenth of a microsecond.
    is_flat = sql.startswith(text, sql.lit("{")) & (sql.instr(text, "}") == sql.octet_length(text))
    # What is left is malformed, begins with a byte order mark, or is allowed by an option.
    rest = sql.ltrim(text, sql.lit(_MARK))
    taken = {name.lower(): value for name, value in given.items() if name.lower().startswith(("allow", "max"))}
    is_read = sql.from_json(rest, "array<struct<_: string>>", taken).isNotNull()  # an object, too
    return ~is_flat & ~is_one_value(text) & is_read & ~_is_one(rest, lambda array: _size(array, taken))


def refuse_more(texts: DataFrame, given: Mapping[str, str], *, whole: bool) -> None:
    """Raise ``SourceError`` if one of the texts, which are documents or lines, has more than one value."""
    found = texts.where(has_more(sql.col(LINE), given))
    first = found.select(file_of(found), sql.left(LINE, sql.lit(_SHOWN))).head()
    if first is None:
        return
    file, begins = first
    if whole:
        raise SourceError(
            f"{file} has more than one JSON document, and multiLine reads the first of a file; if each event is on a "
            "line of its own, leave multiLine out"
        )
    raise SourceError(
        f"{file} has more behind the first JSON value of a line, which would not be read; put each event on a line of "
        f"its own, without commas between them. Such lines in all files: {found.count():,}; one begins with {begins}"
    )


def is_one_value(text: Column) -> Column:
    """Whether a text is one JSON value, and nothing else."""
    return _is_one(text, lambda array: sql.json_array_length(array))


def _is_one(text: Column, length: Callable[[Column], Column]) -> Column:
    """Whether a text is one JSON value, by the length of an array in which it stands.

    A text that closes the array by a bracket of its own has the same length with another element behind it.
    """
    alone, before_another = (length(sql.concat(sql.lit("["), text, sql.lit(end))) for end in ("\n]", "\n,0]"))
    closes_nothing = ~sql.contains(text, sql.lit("]"))
    return sql.coalesce((alone == 1) & (closes_nothing | (before_another == 2)), sql.lit(False))


def _size(array: Column, taken: Mapping[str, str]) -> Column:
    depth = taken.get(_DEPTH, "")
    deeper = {_DEPTH: str(int(depth) + 1)} if depth.isdecimal() else {}
    return sql.size(sql.from_json(array, "array<string>", {**taken, **deeper}))
