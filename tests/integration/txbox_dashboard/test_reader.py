"""The reads of a page are bounded, and change nothing."""

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from txbox_dashboard.reader import Reader


def test_what_takes_too_long_is_left_out(engine: Engine) -> None:
    reader = Reader(engine, None, "")
    assert reader.rows("all of it", "SELECT pg_sleep(60)") is None
    assert reader.left_out == {"all of it": "not read in time"}
    assert reader.rows("the rest", "SELECT 1 AS one") == [{"one": 1}]
    assert 0.2 < reader.seconds < 30


def test_nothing_can_be_written(engine: Engine) -> None:
    with pytest.raises(DBAPIError, match="read-only transaction"):
        Reader(engine, None, "").rows("it", "DELETE FROM paused")


def test_the_limits_do_not_stay_in_the_pool(engine: Engine) -> None:
    Reader(engine, None, "").rows("it", "SELECT 1")
    with engine.connect() as connection:
        limits = [
            connection.exec_driver_sql(f"SHOW {name}").scalar_one()
            for name in ("statement_timeout", "transaction_read_only")
        ]
    assert limits == ["0", "off"]
