"""Numbers of JSON that no decimal of Spark holds: none becomes another one without a word."""

from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import SparkSession

from support.spark.event_files import Read, Write
from txbox_spark.reading.errors import SourceError
from txbox_spark.reading.sources import read_events

LARGE = "1" * 39


@pytest.mark.parametrize("options", [{}, {"multiLine": "true"}, {"encoding": "latin1"}])
@pytest.mark.parametrize(
    ("value", "other"),
    [
        ("9007199254740993", LARGE),
        (LARGE, LARGE),
        ('{"x": [{"y": 9007199254740993}]}', f'{{"x": [{{"y": {LARGE}}}]}}'),
        ("[[9007199254740993]]", f"[[{LARGE}], null]"),
    ],
)
def test_rows_that_would_change_each_other_are_refused(
    spark: SparkSession, write: Write, value: str, other: str, options: dict[str, str]
) -> None:
    lines = f'{{"id": "\u00e9", "n": {value}}}', f'{{"id": "b", "n": {other}}}'
    text = f"[{lines[0]},{lines[1]}]" if "multiLine" in options else "\n".join(lines)
    path = write("events.json", text.encode(options.get("encoding", "utf-8")))
    with pytest.raises(SourceError, match=r"column n .*a decimal of 38 digits.*--fields 'n text'"):
        read_events(spark, [path], options=options)
    if "{" not in value and "[" not in value:
        kept = read_events(spark, [path], schema="id string, n string", options=options)
        assert [row.n for row in kept.orderBy("id").collect()] == [other, value]


@pytest.mark.parametrize("options", [{}, {"encoding": "latin1"}, {"encoding": "latin1", "multiLine": "true"}])
@pytest.mark.parametrize(
    "values",
    [("-12345678901234567.89", "1e-300"), ("1E400", "1"), ("[-1.2345e-320]", "[0.5]")],
    ids=["many", "large", "small"],
)
def test_digits_behind_the_point_count(read: Read, values: tuple[str, str], options: dict[str, str]) -> None:
    lines = [f'{{"\u00e9": "\\" 7, -8", "n": {value}}}' for value in values]
    text = f"[{','.join(lines)}]" if "multiLine" in options else "\n".join(lines)
    with pytest.raises(SourceError, match=r"column n .*would change"):
        read("events.json", text.encode(options.get("encoding", "utf-8")), options=options)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1e-300", "0.05"], [1e-300, 0.05]),
        (["1e-300", "0.30000000000000004", "1000000", "null"], [1e-300, 0.30000000000000004, 1e6, None]),
        (["9007199254740993", "1.5"], [Decimal("9007199254740993.0"), Decimal("1.5")]),
        (["9" * 38, "1"], [Decimal("9" * 38), Decimal(1)]),
    ],
)
def test_numbers_that_keep_their_values_are_read(read: Read, values: list[str], expected: list[Any]) -> None:
    assert [
        row.n for row in read("events.jsonl", "\n".join(f'{{"n": {value}}}' for value in values)).collect()
    ] == expected
