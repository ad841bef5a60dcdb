"""Watermarks advanced by a table of events: what is left in it, against what Python works out."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, column
from sqlalchemy.exc import DBAPIError

from support.postgres.statements import statements_sent
from txbox.postgres.sqlstates import sqlstate
from txbox.watermarks import Watermarks

BILLING = Watermarks("billing")

Row = tuple[str, int, int]
ROWS = st.lists(st.tuples(st.sampled_from(["account", "order"]), st.integers(1, 3), st.integers(-2, 6)))


def create(connection: Connection, rows: list[Row], name: str = "fresh_event") -> None:
    """Make a temporary table of events, each with a number of its own."""
    connection.exec_driver_sql(
        f"CREATE TEMPORARY TABLE {name} (kind text, id int, version int, number serial) ON COMMIT DROP"
    )
    for row in rows:
        connection.exec_driver_sql(f"INSERT INTO {name} (kind, id, version) VALUES (%s, %s, %s)", row)


def left(connection: Connection, name: str = "fresh_event") -> list[Row]:
    return [tuple(row) for row in connection.exec_driver_sql(f"SELECT kind, id, version FROM {name}")]


def sift(connection: Connection, **changed: Any) -> int:
    usual = {"aggregate_type": column("kind"), "aggregate_id": "id", "sequence": "version"}
    return BILLING.advance_from(connection, **{**usual, **changed})


def truth(before: dict[tuple[str, int], int], rows: list[Row], *, newest_only: bool) -> list[Row]:
    """The events that are to be left, sorted."""
    above = sorted({(kind, name, at) for kind, name, at in rows if at > before.get((kind, name), at - 1)})
    if not newest_only:
        return above
    return [row for row in above if row[2] == max(other[2] for other in above if other[:2] == row[:2])]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(loads=st.lists(ROWS, min_size=1, max_size=3), newest_only=st.booleans())
def test_what_is_above_the_watermarks_is_left_and_nothing_else(
    engine: Engine, loads: list[list[Row]], newest_only: bool
) -> None:
    before: dict[tuple[str, int], int] = {}
    with engine.connect() as connection:
        for number, rows in enumerate(loads):
            create(connection, rows, f"load_{number}")
            expected = truth(before, rows, newest_only=newest_only)
            assert sift(connection, relation=f"load_{number}", newest_only=newest_only) == len(expected)
            assert sorted(left(connection, f"load_{number}")) == expected
            for kind, name, at in rows:
                before[kind, name] = max(at, before.get((kind, name), at))
        found = connection.exec_driver_sql("SELECT aggregate_type, aggregate_id, sequence FROM aggregate_watermark")
        assert {(row[0], int(row[1])): row[2] for row in found} == before
        connection.rollback()


def test_a_table_and_a_batch_have_the_same_watermarks(engine: Engine) -> None:
    with engine.begin() as connection:
        BILLING.advance_many(connection, [("account", "1", 4), ("account", "2", 9)])
        create(connection, [("account", 1, 4), ("account", 1, 5), ("account", 2, 8), ("account", 3, 1)])
        with statements_sent(engine) as sent:
            assert sift(connection, aggregate_type="account") == 2
            assert len(sent) == 1
        assert left(connection) == [("account", 1, 5), ("account", 3, 1)]
    with engine.begin() as connection:
        again = BILLING.advance_many(connection, [("account", str(number), 5) for number in (1, 2, 3)])
        assert again == ["stale", "stale", "applied"]


def test_a_type_that_looks_like_a_column_is_a_value(engine: Engine) -> None:
    with engine.connect() as connection:
        create(connection, [("account", 1, 1)])
        assert sift(connection, aggregate_type="kind") == 1
        found = connection.exec_driver_sql("SELECT aggregate_type FROM aggregate_watermark").scalars().all()
        assert found == ["kind"]


def test_a_relation_may_have_a_name_that_the_statement_uses_too(engine: Engine) -> None:
    for name in ("txbox_event_", "mark", "event", "seen", "wanted", "bound", "found"):
        with engine.connect() as connection:  # which is rolled back
            create(connection, [("account", 1, 1), ("account", 1, 1)], name)
            assert sift(connection, relation=name) == 1
            assert left(connection, name) == [("account", 1, 1)]


@pytest.mark.parametrize("missing", ["kind", "id", "version"])
def test_an_event_without_sequence_or_aggregate_is_refused_and_not_lost(engine: Engine, missing: str) -> None:
    with engine.connect() as connection:
        create(connection, [("account", 1, 1), ("account", 1, 2)])
        BILLING.advance_many(connection, [("account", "1", 7)])
        connection.exec_driver_sql(f"UPDATE fresh_event SET {missing} = NULL WHERE version = 1")
        with pytest.raises(DBAPIError) as caught:
            sift(connection)
        assert sqlstate(caught.value) == "23502"


def test_a_relation_that_is_not_there_is_not_our_table(engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(DBAPIError, match="fresh_event") as caught:
        sift(connection)
    assert sqlstate(caught.value) == "42P01"


def test_many_events_are_sifted_in_one_pass(engine: Engine) -> None:
    with engine.connect() as connection:
        create(connection, [])
        fill = "INSERT INTO fresh_event SELECT 'account', n %% 20000, n / 20000 FROM generate_series(0, 99999) AS n"
        connection.exec_driver_sql(fill)
        assert sift(connection) == 100_000
        connection.exec_driver_sql("UPDATE fresh_event SET version = version + 3")
        assert sift(connection) == 60_000
        assert sorted(set(left(connection)))[:3] == [("account", 0, 5), ("account", 0, 6), ("account", 0, 7)]
