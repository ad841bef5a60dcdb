"""Which lines of CSV begin or end within quotes, against Python's own reader of CSV."""

import csv
import io
import itertools
import re

import pytest

from txbox_spark.reading.files.csv_records import Quoting, quoting_of

STRICT = {"unescapedQuoteHandling": "RAISE_ERROR", "escape": '"'}


def ends_within(text: str, quoting: Quoting) -> bool:
    # Java's \z is Python's \Z.
    opens, stays = (re.compile(pattern.replace(r"\z", r"\Z")) for pattern in (quoting.opens, quoting.stays))
    within = False
    for line in text.split("\n"):
        within = bool((stays if within else opens).search(line))
    return within


def ends_within_to_python(text: str, **format_: str) -> bool | None:
    """None: a quote is neither doubled nor at the end of its field, which Spark refuses by itself."""
    try:
        list(csv.reader(io.StringIO(text, newline=""), strict=True, **format_))
    except csv.Error as error:
        return True if "unexpected end of data" in str(error) else None
    return False


def test_every_short_text_ends_as_pythons_reader_says() -> None:
    quoting = quoting_of(STRICT, ",")
    assert quoting is not None
    seen = {True: 0, False: 0}
    for length in range(8):
        for characters in itertools.product('a",\n', repeat=length):
            text = "".join(characters)
            expected = ends_within_to_python(text)
            if expected is not None:
                seen[expected] += 1
                assert ends_within(text, quoting) == expected, text
    assert min(seen.values()) > 1_000


def test_other_characters_of_the_format() -> None:
    quoting = quoting_of({**STRICT, "QUOTE": "]", "Escape": "]"}, "^")
    assert quoting is not None
    for characters in itertools.product("a]^\n", repeat=6):
        text = "".join(characters)
        expected = ends_within_to_python(text, quotechar="]", delimiter="^")
        assert expected is None or ends_within(text, quoting) == expected, text


@pytest.mark.parametrize(
    "options",
    [
        {"quote": ""},
        {"quote": "''"},
        {"unescapedQuoteHandling": "STOP_AT_DELIMITER"},
        {"charToEscapeQuoteEscaping": "\\"},
    ],
)
def test_where_quotes_mean_something_else_nothing_is_said(options: dict[str, str]) -> None:
    assert quoting_of({**STRICT, **options}, ",") is None
