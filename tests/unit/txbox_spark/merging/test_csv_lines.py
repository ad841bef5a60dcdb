"""Arrow's columns as lines of CSV; what Postgres makes of every type is seen in reading.test_types."""

import csv
import io
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as some

from txbox_spark.merging.fresh_event import csv_lines


def lines(*columns: pyarrow.Array) -> str:
    batch = pyarrow.RecordBatch.from_arrays(list(columns), names=[f"c{number}" for number in range(len(columns))])
    return bytes(csv_lines(batch)).decode()


@pytest.mark.parametrize(
    ("type_", "value", "field"),
    [
        (pyarrow.string(), "plain", '"plain"'),
        (pyarrow.string(), "", '""'),
        (pyarrow.string(), 'a "b", c\n\\.', '"a ""b"", c\n\\."'),
        (pyarrow.large_string(), 'é"', '"é"""'),
        (pyarrow.int16(), -3, "-3"),
        (pyarrow.int64(), 2**63 - 1, "9223372036854775807"),
        (pyarrow.float64(), 0.1, "0.1"),
        (pyarrow.float64(), float("nan"), "nan"),
        (pyarrow.float64(), float("-inf"), "-inf"),
        (pyarrow.float32(), 0.1, "0.1"),
        (pyarrow.decimal128(38, 18), Decimal("-1.50"), "-1.500000000000000000"),
        (pyarrow.bool_(), True, "true"),
        (pyarrow.date32(), date(1, 1, 1), "0001-01-01"),
        (pyarrow.timestamp("us"), datetime(2026, 3, 29, 2, 30), "2026-03-29 02:30:00.000000"),  # noqa: DTZ001
        (pyarrow.timestamp("us", "UTC"), datetime(2026, 1, 1, tzinfo=UTC), '"2026-01-01 00:00:00.000000Z"'),
        (pyarrow.timestamp("us", "Asia/Tokyo"), datetime(1900, 1, 1, tzinfo=UTC), '"1900-01-01 00:00:00.000000Z"'),
    ],
)
def test_a_value(type_: pyarrow.DataType, value: Any, field: str) -> None:
    """Null is nothing at all, beside a value and alone."""
    numbers = pyarrow.array([1, 2])
    assert lines(numbers, pyarrow.array([value, None], type_)) == f"1,{field}\n2,\n"
    assert lines(pyarrow.array([None, value], type_), numbers) == f",1\n{field},2\n"
    assert lines(pyarrow.array([None], type_), pyarrow.array([5])) == ",5\n"


@given(some.lists(some.tuples(some.text(some.characters(exclude_characters="\0\r", exclude_categories=["Cs"])),
                              some.integers(-(2**63), 2**63 - 1))), some.integers(0, 3))  # fmt: skip
def test_texts_and_numbers(rows: list[tuple[str, int]], skipped: int) -> None:
    """Also of a part of a batch, which keeps all of the batch's memory."""
    texts, numbers = pyarrow.array([one for one, _ in rows], pyarrow.string()), pyarrow.array([two for _, two in rows])
    batch = pyarrow.RecordBatch.from_arrays([texts, numbers.cast(pyarrow.int64())], names=["a", "b"]).slice(skipped)
    read = csv.reader(io.StringIO(bytes(csv_lines(batch)).decode(), newline=""))
    assert [(one, int(two)) for one, two in read] == rows[skipped:]
