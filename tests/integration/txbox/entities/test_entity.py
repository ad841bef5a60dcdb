"""Rows that remember their messages: what is applied once, what is not newer, and what sessions see of it."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from support.txbox.entities import LEVELS, Account, Base, add, replace, row
from txbox import EntityMissing, InvalidConfiguration, NotInTransaction, TxboxError
from txbox.entities import update_if_newer, update_once

# --- recent message ids ----------------------------------------------------------------------------------------------


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


# --- highest event ids -----------------------------------------------------------------------------------------------


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


# --- sessions: what their objects hold agrees with the row -----------------------------------------------------------


def test_an_object_in_the_session_reads_what_the_row_holds(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        ann = session.get_one(Account, "ann")
        assert ann.cents == 0
        assert ann.recent_message_ids == []
        with engine.begin() as other:  # what the object holds is old by now
            assert add(other, "m-0", 100)
        assert add(session, "m-1", 5)
        assert (ann.cents, ann.recent_message_ids) == (105, ["m-1", "m-0"])
        assert replace(session, 1, 7)
        assert (ann.cents, ann.highest_event_ids) == (7, {"shop": 1})
    assert row(engine).cents == 7


def test_what_the_session_has_not_flushed_yet_is_flushed_before(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        ann = session.get_one(Account, "ann")
        ann.cents = 50
        session.add(Account(account_id="eve", cents=10))
        assert add(session, "m-1", 5)
        assert add(session, "m-1", 5, "eve")
        assert ann.cents == 55
    assert (row(engine).cents, row(engine, "eve").cents) == (55, 15)


def test_a_session_that_does_not_flush_by_itself_keeps_what_is_pending(engine: Engine) -> None:
    with Session(engine, autoflush=False) as session, session.begin():
        ann = session.get_one(Account, "ann")
        ann.note = "pending"
        assert add(session, "m-1", 5)
        assert (ann.note, ann.cents) == ("pending", 5)
    assert (row(engine).note, row(engine).cents) == ("pending", 5)


def test_a_scoped_session_is_a_session(engine: Engine) -> None:
    session = scoped_session(sessionmaker(engine))
    ann = session.get_one(Account, "ann")
    assert add(session, "m-1", 5)
    assert ann.cents == 5
    session.rollback()
    session.remove()
    assert row(engine).cents == 0


def test_a_session_of_several_engines_updates_where_the_entity_is(engine: Engine, fresh_database: str) -> None:
    elsewhere = create_engine(fresh_database)
    with Session(elsewhere, binds={Account: engine}) as session, session.begin():
        assert add(session, "m-1", 5)
    elsewhere.dispose()
    assert row(engine).cents == 5


# --- updates that are neither applied nor duplicates -----------------------------------------------------------------


def test_a_row_that_is_not_there_is_no_duplicate(engine: Engine) -> None:
    with engine.begin() as connection:
        with pytest.raises(EntityMissing) as missing:
            add(connection, "m-1", account_id="eve")
        assert (missing.value.entity, missing.value.key) == ("account", "account_id='eve'")
        with pytest.raises(EntityMissing):
            update_if_newer(connection, Account, "eve", "shop", 1, {})


def test_autocommit_is_refused(engine: Engine) -> None:
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with autocommit.connect() as connection, pytest.raises(NotInTransaction):
        add(connection, "m-1")
    with Session(autocommit) as session, pytest.raises(NotInTransaction):
        replace(session, 1, 1)
    assert row(engine).recent_message_ids == []


def test_an_update_that_a_trigger_prevents_is_neither_applied_nor_a_duplicate(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$; "
            "CREATE TRIGGER nothing BEFORE UPDATE ON account FOR EACH ROW EXECUTE FUNCTION nothing()"
        )
        with pytest.raises(TxboxError, match="a trigger or a policy"):
            add(connection, "m-1")
