"""Recent message ids: a row applies each message once, for as long as it remembers it."""

import pytest
from sqlalchemy import Connection, Engine, select

from support.txbox.entities import LEVELS, Account, add, replace, row
from txbox.entities import update_if_newer, update_once


@pytest.mark.parametrize("level", LEVELS)
def test_the_first_time_is_applied_and_every_other_time_is_not(engine: Engine, level: str) -> None:
    answers = []
    for _ in range(3):
        with engine.execution_options(isolation_level=level).begin() as connection:
            answers.append((add(connection, "m-1", 5), replace(connection, 7, 5)))
    assert answers == [(True, True), (False, False), (False, False)]
    assert (row(engine).cents, row(engine).recent_message_ids, row(engine).highest_event_ids) == (
        5,
        ["m-1"],
        {"shop": 7},
    )


def test_a_rollback_takes_the_id_back(engine: Engine) -> None:
    with engine.connect() as connection:
        assert add(connection, "m-1", 5)
        assert replace(connection, 1, 9)
        connection.rollback()
        assert add(connection, "m-1", 5)
        assert replace(connection, 1, 9)
        connection.commit()
    assert row(engine).cents == 9


def test_a_row_keeps_the_newest_ids_up_to_the_bound_and_applies_what_it_has_forgotten(engine: Engine) -> None:
    with engine.begin() as connection:
        for number in range(4):
            assert add(connection, f"m-{number}")
        assert row_ids(connection) == ["m-3", "m-2", "m-1"]
        assert not add(connection, "m-1"), "the oldest that is kept"
        assert row_ids(connection) == ["m-3", "m-2", "m-1"], "a duplicate refreshes nothing"
        assert add(connection, "m-0"), "three others have come since"
    assert row(engine).cents == 5


def test_a_bound_that_was_lowered_cuts_the_row_at_its_next_update(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.begin() as connection:
        for number in range(3):
            add(connection, f"m-{number}")
        monkeypatch.setattr(Account, "recent_message_ids_kept", 1)
        add(connection, "m-3")
        assert row_ids(connection) == ["m-3"]


def row_ids(connection: Connection) -> list[str]:
    return connection.execute(select(Account.recent_message_ids).where(Account.account_id == "ann")).scalar_one()


def test_ids_may_be_any_text(engine: Engine) -> None:
    for name in ["'; DROP TABLE account --", '{"}', "a,b", "NULL", "\\", "%s", ":x", "ß", "Ann", "ann", "é", "e\u0301"]:
        with engine.begin() as connection:
            assert add(connection, name)
            assert update_if_newer(connection, Account, "bob", name, name, {})
            assert not add(connection, name)
            assert not update_if_newer(connection, Account, "bob", name, name, {})
    assert row(engine).cents == 12


def test_columns_that_were_left_null_by_others_are_empty_memories(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "ALTER TABLE account ALTER recent_message_ids DROP NOT NULL, ALTER highest_event_ids DROP NOT NULL"
        )
        connection.exec_driver_sql("UPDATE account SET recent_message_ids = NULL, highest_event_ids = NULL")
        assert add(connection, "m-1")
        assert not add(connection, "m-1")
        assert replace(connection, 1, 5)
        assert not replace(connection, 1, 6)
        connection.exec_driver_sql("UPDATE account SET recent_message_ids = '{NULL}'")
        connection.exec_driver_sql("""UPDATE account SET highest_event_ids = '{"shop": null}'""")
        assert add(connection, "m-1")
        assert not add(connection, "m-1")
        assert replace(connection, 1, 7)
        assert not replace(connection, 1, 9)
    assert row(engine).cents == 7


def test_nothing_else_need_be_set(engine: Engine) -> None:
    with engine.begin() as connection:
        assert update_once(connection, Account, "ann", "m-1", {})
        assert not update_once(connection, Account, "ann", "m-1", {})
    assert row(engine).recent_message_ids == ["m-1"]
