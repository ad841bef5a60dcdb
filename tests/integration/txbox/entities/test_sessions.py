"""Sessions: what their objects hold agrees with the row."""

from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from support.txbox.entities import Account, add, replace, row


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
