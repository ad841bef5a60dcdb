"""Times as numbers: whatever Postgres can keep, reading it raises nothing."""

from datetime import UTC, datetime

import pytest
from sqlalchemy import Engine

from txbox.postgres.sql import microseconds, moment


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-28 13:00:00.000001+00", datetime(2026, 11, 28, 13, 0, 0, 1, tzinfo=UTC)),
        ("infinity", None),
        ("-infinity", None),
        ("4714-11-24 00:00:00+00 BC", None),
        ("294276-12-31 23:59:59.999999+00", None),
    ],
)
def test_each_time_can_be_read(engine: Engine, text: str, expected: datetime | None) -> None:
    with engine.connect() as connection:
        time = f"'{text}'::timestamptz"
        assert moment(connection.exec_driver_sql(f"SELECT {microseconds(time)}").scalar_one()) == expected
