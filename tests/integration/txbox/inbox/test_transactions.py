"""The inbox in one transaction: first or not, for a connection and for a session, committed or rolled back."""

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from support.txbox.inbox import recorded
from txbox import Inbox, Recorded


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_the_first_time_is_true_and_every_other_time_is_false(engine: Engine, inbox: Inbox, level: str) -> None:
    answers = []
    for _ in range(3):
        with engine.execution_options(isolation_level=level).begin() as connection:
            answers.append(inbox.record(connection, "m-1"))
    assert answers == [True, False, False]
    assert recorded(engine) == [("billing", "m-1")]


def test_a_session_is_as_good_as_a_connection(engine: Engine, inbox: Inbox) -> None:
    with Session(engine) as session, session.begin():
        assert inbox.record(session, "m-1") is True
        assert inbox.record_many(session, ["m-1", "m-2"]) == {"m-2"}
        assert inbox.sort_out(session, ["m-2", "m-3"]) == Recorded(frozenset({"m-3"}), frozenset())
    with Session(engine) as session, session.begin():
        assert inbox.record(session, "m-1") is False
    assert recorded(engine) == [("billing", "m-1"), ("billing", "m-2"), ("billing", "m-3")]


def test_a_scoped_session_is_a_session(engine: Engine, inbox: Inbox) -> None:
    session = scoped_session(sessionmaker(engine))
    assert inbox.record(session, "m-1") is True
    session.rollback()
    session.remove()
    assert recorded(engine) == []


def test_each_subscriber_has_a_space_of_its_own(engine: Engine) -> None:
    with engine.begin() as connection:
        assert Inbox("billing").record(connection, "m-1") is True
        assert Inbox("shipping").record(connection, "m-1") is True
        assert Inbox("shipping").record_many(connection, ["m-1", "m-2"]) == {"m-2"}
        assert Inbox("billing").record(connection, "m-2") is True
    assert recorded(engine) == [("billing", "m-1"), ("billing", "m-2"), ("shipping", "m-1"), ("shipping", "m-2")]


def test_a_rollback_leaves_nothing(engine: Engine, inbox: Inbox) -> None:
    with engine.connect() as connection:
        assert inbox.record(connection, "m-1")
        assert inbox.record_many(connection, ["m-2"]) == {"m-2"}
        connection.rollback()
    assert recorded(engine) == []
    with engine.begin() as connection:
        assert inbox.record(connection, "m-1") is True


def test_a_savepoint_that_is_rolled_back_leaves_nothing(engine: Engine, inbox: Inbox) -> None:
    with engine.begin() as connection:
        assert inbox.record(connection, "outer")
        savepoint = connection.begin_nested()
        assert inbox.record(connection, "inner")
        savepoint.rollback()
        assert inbox.record(connection, "inner again")
    assert recorded(engine) == [("billing", "inner again"), ("billing", "outer")]
