"""Highest event ids: a row drops what is not newer than all that it has applied."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from support.txbox.entities import Account, Base, replace, row
from txbox import InvalidConfiguration


@pytest.mark.parametrize(
    "ids",
    [
        [2, 10, 9, 10, 11, 2],
        [-5, -6, 0, 0, -1, 1],
        [2**53, 2**53 + 1, 2**53, 10**38 - 1, 10**38 - 2, 2**64],
        ["B", "a", "Z", "é", "z", "aa"],
        ["10", "9", "10", "1", "90", "91"],
    ],
)
def test_what_is_not_higher_than_all_before_is_dropped(engine: Engine, ids: list[Any]) -> None:
    expected, highest = [], None
    for event_id in ids:
        key = event_id if isinstance(event_id, int) else event_id.encode()
        expected.append(highest is None or key > highest)
        highest = key if expected[-1] else highest
    assert len(set(expected)) == 2, "the ids are a test of both"
    applied = []
    for number, event_id in enumerate(ids):
        with engine.begin() as connection:
            applied.append(replace(connection, event_id, number))
    assert applied == expected
    last = max(number for number, was in enumerate(expected) if was)
    assert (row(engine).cents, row(engine).highest_event_ids) == (last, {"shop": ids[last]})


def test_texts_are_compared_by_a_collation_that_is_named(engine: Engine) -> None:
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    with engine.begin() as connection:
        replace(connection, "a", 1)
    (updated,) = [statement for statement in statements if statement.startswith("UPDATE")]
    assert 'COLLATE "C") < CAST(' in updated


def test_texts_are_compared_byte_by_byte_whatever_the_database_prefers(make_database: Callable[..., str]) -> None:
    # PostgreSQL 15 and newer; in a dictionary's order, "a" would come before "B".
    options = "ENCODING 'UTF8' LOCALE 'C' LOCALE_PROVIDER icu ICU_LOCALE 'en-US' TEMPLATE template0"
    try:
        engine = create_engine(make_database(options))
    except DBAPIError as error:
        pytest.skip(f"this server has no ICU, `make test-containers` starts one that has: {error.orig}")
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(Account(account_id="ann"))
        assert session.scalar(text("SELECT 'a' < 'B'")) is True
        assert [replace(session, event_id, 1) for event_id in ("B", "a", "Z")] == [True, True, False]
    engine.dispose()


def test_each_source_has_an_order_of_its_own(engine: Engine) -> None:
    with engine.begin() as connection:
        assert replace(connection, 7, 1, "shop")
        assert replace(connection, 3, 2, "till")
        assert replace(connection, "a", 3, "desk")
        assert not replace(connection, 3, 4, "shop")
    assert row(engine).highest_event_ids == {"shop": 7, "till": 3, "desk": "a"}
    assert row(engine).cents == 3


@pytest.mark.parametrize(("before", "after"), [(5, "6"), ("5", 6), (0, "0"), (5, "x")])
def test_numbers_and_texts_of_one_source_are_never_compared(engine: Engine, before: Any, after: Any) -> None:
    with engine.connect() as connection:
        assert replace(connection, before, 1)
        with pytest.raises(InvalidConfiguration, match="cannot be compared with"):
            replace(connection, after, 2)
        connection.commit()
    assert (row(engine).cents, row(engine).highest_event_ids) == (1, {"shop": before})
