"""Rows that ``csv_lines`` writes and Postgres reads by COPY: they arrive as they were, whatever their values."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from sqlalchemy import Engine

from txbox_spark.merging.fresh_event import copy_fresh, create_fresh, csv_lines
from txbox_spark.reading.columns import EventColumn

EARLIEST, LATEST = datetime(1, 1, 2), datetime(9999, 12, 30)  # noqa: DTZ001 - times without a zone

TYPES = (
    ("text", pyarrow.string(), some.text(some.characters(exclude_characters="\0", exclude_categories=["Cs"]))),
    ("text", pyarrow.large_string(), some.text(some.sampled_from('",;\\\n\r\tN. é'))),
    ("smallint", pyarrow.int16(), some.integers(-(2**15), 2**15 - 1)),
    ("integer", pyarrow.int32(), some.integers(-(2**31), 2**31 - 1)),
    ("bigint", pyarrow.int64(), some.integers(-(2**63), 2**63 - 1)),
    ("real", pyarrow.float32(), some.floats(width=32)),
    ("double precision", pyarrow.float64(), some.floats()),
    ("numeric(38,9)", pyarrow.decimal128(38, 9), some.decimals(-(10**28), 10**28, places=9)),
    ("boolean", pyarrow.bool_(), some.booleans()),
    ("date", pyarrow.date32(), some.dates(EARLIEST.date(), LATEST.date())),
    ("timestamp without time zone", pyarrow.timestamp("us"), some.datetimes(EARLIEST, LATEST)),
    (
        "timestamp with time zone",
        pyarrow.timestamp("us", "Asia/Tokyo"),
        some.datetimes(EARLIEST, LATEST, timezones=some.just(UTC)),
    ),
)

COLUMNS = tuple(EventColumn(f"column {number}", f"c{number}", name) for number, (name, _, _) in enumerate(TYPES))
ROWS = some.lists(some.tuples(*[some.none() | values for _, _, values in TYPES]), max_size=30)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS, some.integers(0, 3))
def test_rows_of_every_type(engine: Engine, rows: Sequence[Sequence[Any]], skipped: int) -> None:
    """Also rows of a part of a batch, in a session of another time zone."""
    values = [pyarrow.array([row[at] for row in rows], type_) for at, (_, type_, _) in enumerate(TYPES)]
    ids = pyarrow.array([f"{number:02}" for number in range(len(rows))], pyarrow.string())
    names = ["message_id", *(one.staged_as for one in COLUMNS)]
    batch = pyarrow.RecordBatch.from_arrays([ids, *values], names=names).slice(skipped)
    with engine.connect() as connection:
        connection.exec_driver_sql("SET LOCAL TimeZone = 'America/New_York'")
        connection.exec_driver_sql(create_fresh(COLUMNS))
        driver_connection: Any = connection.connection.driver_connection
        with driver_connection.cursor(binary=True) as cursor:
            with cursor.copy(copy_fresh(COLUMNS)) as copy:
                copy.write(csv_lines(batch))
            found = cursor.execute("SELECT * FROM pg_temp.fresh_event ORDER BY message_id").fetchall()
    sent = zip(*(column.to_pylist() for column in batch.columns), strict=True)
    assert [list(map(comparable, row)) for row in found] == [list(map(comparable, row)) for row in sent]


def comparable(value: Any) -> Any:
    """Return NaN as text, because it does not equal itself, and a zero with its sign."""
    if isinstance(value, float) and (math.isnan(value) or value == 0):
        return str(value)
    return value
