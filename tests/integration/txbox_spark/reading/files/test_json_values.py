"""Lines and documents of more than one JSON value: Spark reads the first, so nothing of such a file is loaded."""

from collections.abc import Mapping
from typing import Any

import pytest

from support.effects import FIELDS, MORE_THAN_ONE
from support.spark.event_files import Read
from txbox.effects.fields import read_fields
from txbox_spark.reading.errors import SourceError

GOOD = '{"id": "a"}\n{"id": "b", "in": {"x": [1, 2]}}\n'
ONE = (
    '{"id": "c"}',
    ' \t{"id": "c"} \t',
    '{"id": "}{"}',
    '{"id": "c", "in": {"x": [{}, []]}}',
    '{"id": "c", "in": {"x": ["]", "}{", "],0]"]}}',
    '{"id": "c", "in": {"x": NaN}}',
    "{'id': 'c', 'in': {'x': [\"]\"]}}",
    "[]",
    "",
    " ",
)
MORE = (
    *MORE_THAN_ONE,
    '{"id": "c"}{"id": "d"}',
    '{"id": "c"}] x',
    '{"id": "c"},0] x',
    '{"id": "c"},\n{"id": "d"}',
    '{"id": "c", "in": {"x": NaN}} {"id": "d"}',
    '{"id": "c"}\u00a0',
    '[{"id": "c"}] [{"id": "d"}]',
    '[]{"id": "c"}',
    '[ ]{"id": "c"}',
)
MALFORMED = ('{"id": "c"', "{'id': 'c'", "secret", '{"id": "c" "x": 1}')


def ids(frame: Any) -> list[str]:
    return [row.id for row in frame.select("id").collect() if row.id is not None]


def test_lines_of_one_value_are_loaded(read: Read) -> None:
    frame = read("e.jsonl", GOOD + "\n".join(ONE), schema="id string")
    assert ids(frame) == ["a", "b", "c", "c", "}{", *"cccc"]


def test_lines_of_more_are_refused(read: Read) -> None:
    said = f"e.jsonl has more behind the first JSON value of a line.*in all files: {len(MORE)};"
    with pytest.raises(SourceError, match=said):
        read("e.jsonl", GOOD + "\n".join(MORE), schema="id string")


def test_a_file_of_one_line_is_refused_however_it_is_read(read: Read) -> None:
    """As services write it that put one record behind the other."""
    text = "".join(f'{{"id": "{number}", "at": {{"x": {number}}}}}' for number in range(1_000))
    refused = pytest.raises(SourceError, match="in all files: 1; one begins with")
    with refused:
        read("plain.jsonl", text)
    with refused:
        read("marked.jsonl", "\ufeff" + text)
    with refused:
        read("packed.jsonl.gz", text)
    with refused:
        read("latin.jsonl", text.replace("at", "été").encode("latin-1"), encoding="latin1")
    with refused:
        read("fields.jsonl", text, fields=read_fields(FIELDS), message_id="id")
    with refused:  # beside a line that is not text
        read("broken.jsonl", b'{"id": "\xff"}\n' + text.encode())


def test_malformed_lines_are_still_that(read: Read) -> None:
    frame = read("e.jsonl", GOOD + "\n".join(MALFORMED), schema="id string")
    assert [row[-1] for row in frame.collect()] == [None, None, *MALFORMED]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"allowUnquotedFieldNames": "true"}, "{id: 'c', in: {x: [']']}}"),
        ({"ALLOWCOMMENTS": "true"}, '{"id": "c"} // {"id": "d"}'),
        ({"allowNumericLeadingZeros": "true"}, '{"id": "c", "in": {"x": 007}}'),
        ({"maxNestingDepth": "1500"}, f'{{"id": "c", "in": {"[" * 1499}{"]" * 1499}}}'),
        ({"maxNumLen": "5000"}, f'{{"id": "c", "in": {{"x": {"1" * 2000}}}}}'),
    ],
)
def test_what_an_option_allows_is_allowed(read: Read, options: Mapping[str, str], line: str) -> None:
    assert ids(read("e.jsonl", GOOD + line, schema="id string", options=options)) == ["a", "b", "c"]
    with pytest.raises(SourceError, match="more behind the first JSON value"):
        read("more.jsonl", f'{line.partition("//")[0]} {{"id": "d"}}', options=options)


class TestDocuments:
    OPTIONS: Mapping[str, str] = {"multiLine": "true"}

    @pytest.mark.parametrize("encoding", ["UTF-8", "UTF-16LE"])
    def test_one_for_a_file(self, read: Read, encoding: str) -> None:
        document = '[\n  {"id": "a"},\n  {"id": "b", "in": {"x": ["]", 2]}}\n]\n'
        frame = read("e.json", document.encode(encoding), schema="id string", encoding=encoding, options=self.OPTIONS)
        assert ids(frame) == ["a", "b"]

    @pytest.mark.parametrize(
        ("document", "encoding"),
        [
            (GOOD, "UTF-8"),
            (GOOD, "UTF-16LE"),
            ('[{"id": "a"}]\n[{"id": "b"}]', "UTF-8"),
            ('{"id": "a"}, {"id": "b"}', "UTF-8"),
            ('[] {"id": "b"}', "UTF-8"),
        ],
    )
    def test_more_are_refused(self, read: Read, document: str, encoding: str) -> None:
        with pytest.raises(SourceError, match=r"more than one JSON document.* leave multiLine out"):
            read("e.json", document.encode(encoding), schema="id string", encoding=encoding, options=self.OPTIONS)
