"""Rows that remember their messages: applied once, at every isolation level, in any kind of mapped class."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from alembic.autogenerate import compare_metadata, produce_migrations, render_python_code
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, ForeignKey, String, Text, create_engine, event, func, select, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from support.blocking import backend_pid, wait_until_blocked
from txbox import EntityMissing, InvalidConfiguration, NotInTransaction, TxboxError
from txbox.entity import HighestEventIds, RecentMessageIds, update_if_newer, update_once
from txbox.sqlstates import SERIALIZATION_FAILURE, sqlstate

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


class Base(DeclarativeBase):
    pass


class Account(RecentMessageIds, HighestEventIds, Base):
    __tablename__ = "account"
    recent_message_ids_kept = 3

    account_id: Mapped[str] = mapped_column(primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)
    note: Mapped[str | None]


class Order(RecentMessageIds, HighestEventIds, Base):
    """Reserved words, attributes that are not called like their columns, and a key of two columns."""

    __tablename__ = "order"

    tenant: Mapped[str] = mapped_column("user", primary_key=True)
    number: Mapped[int] = mapped_column("select", primary_key=True)
    total: Mapped[int] = mapped_column("Group by", default=0)


class Party(RecentMessageIds, HighestEventIds, Base):
    """The root of both kinds of inheritance."""

    __tablename__ = "party"
    __mapper_args__: ClassVar = {"polymorphic_on": "kind", "polymorphic_identity": "party"}

    party_id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    visits: Mapped[int] = mapped_column(default=0)


class Guest(Party):
    __mapper_args__: ClassVar = {"polymorphic_identity": "guest"}

    rating: Mapped[int | None]


class Member(Party):
    __tablename__ = "member"
    __mapper_args__: ClassVar = {"polymorphic_identity": "member"}

    member_id: Mapped[int] = mapped_column(ForeignKey("party.party_id"), primary_key=True)
    points: Mapped[int] = mapped_column(default=0)


class Device(Base):
    """A root that remembers nothing."""

    __tablename__ = "device"
    __mapper_args__: ClassVar = {"polymorphic_on": "kind", "polymorphic_identity": "device"}

    device_id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    label: Mapped[str | None]


class Meter(RecentMessageIds, Device):
    """Remembers in the table of its own."""

    __tablename__ = "meter"
    __mapper_args__: ClassVar = {"polymorphic_identity": "meter"}

    device_id: Mapped[int] = mapped_column(ForeignKey("device.device_id"), primary_key=True)
    reading: Mapped[int] = mapped_column(default=0)


@pytest.fixture(autouse=True)
def accounts(engine: Engine) -> None:
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all([Account(account_id="ann"), Account(account_id="bob")])


@pytest.fixture
def sessions(engine: Engine) -> Iterator[Callable[[str], Session]]:
    """Open a session at an isolation level: sessions(level)."""
    opened: list[Session] = []

    def open_session(level: str = "READ COMMITTED") -> Session:
        opened.append(Session(engine.execution_options(isolation_level=level)))
        return opened[-1]

    yield open_session
    for session in opened:
        session.close()


def add(where: Any, message_id: str, cents: int = 1, account_id: str = "ann") -> bool:
    return update_once(where, Account, account_id, message_id, {Account.cents: Account.cents + cents})


def replace(where: Any, event_id: int | str, cents: int, source: str = "shop") -> bool:
    return update_if_newer(where, Account, "ann", source, event_id, {"cents": cents})


def row(engine: Engine, account_id: str = "ann") -> Any:
    with engine.connect() as connection:
        return connection.execute(select(Account.__table__).where(Account.account_id == account_id)).one()


# -- applied once ---------------------------------------------------------------------------------------------------


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


def test_a_second_time_in_the_same_transaction_is_a_duplicate(engine: Engine) -> None:
    with engine.begin() as connection:
        assert add(connection, "m-1")
        assert not add(connection, "m-1")
        assert replace(connection, 1, 10)
        assert not replace(connection, 1, 20)
    assert row(engine).cents == 10


def test_another_row_has_a_memory_of_its_own(engine: Engine) -> None:
    with engine.begin() as connection:
        assert add(connection, "m-1", account_id="ann")
        assert add(connection, "m-1", account_id="bob")
    assert (row(engine, "ann").cents, row(engine, "bob").cents) == (1, 1)


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


# -- highest event ids ----------------------------------------------------------------------------------------------


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
        pytest.skip(f"this server has no ICU: {error.orig}")
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


# -- refusals -------------------------------------------------------------------------------------------------------


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


# -- sessions -------------------------------------------------------------------------------------------------------


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


# -- races ----------------------------------------------------------------------------------------------------------

APPLY: dict[str, Callable[[Any], bool]] = {
    "once": lambda where: add(where, "m-1", 5),
    "newer": lambda where: replace(where, 1, 5),
}


@pytest.mark.parametrize("how", APPLY)
def test_at_read_committed_the_second_waits_and_finds_the_id(
    engine: Engine, sessions: Callable[..., Session], pool: ThreadPoolExecutor, how: str
) -> None:
    first, second = sessions(), sessions()
    assert APPLY[how](first)
    pid = backend_pid(second.connection())
    later = pool.submit(APPLY[how], second)
    wait_until_blocked(engine, pid)
    first.commit()
    assert later.result(20) is False
    second.commit()
    assert row(engine).cents == 5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", APPLY)
def test_the_second_applies_what_the_first_rolls_back(
    engine: Engine, sessions: Callable[..., Session], pool: ThreadPoolExecutor, how: str, level: str
) -> None:
    first, second = sessions(level), sessions(level)
    assert APPLY[how](first)
    pid = backend_pid(second.connection())
    later = pool.submit(APPLY[how], second)
    wait_until_blocked(engine, pid)
    first.rollback()
    assert later.result(20) is True
    second.commit()
    assert row(engine).cents == 5


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("how", APPLY)
def test_a_snapshot_that_is_older_than_the_firsts_commit_fails_to_be_run_again(
    engine: Engine, sessions: Callable[..., Session], pool: ThreadPoolExecutor, how: str, level: str
) -> None:
    first, second = sessions(level), sessions(level)
    assert APPLY[how](first)
    pid = backend_pid(second.connection())
    later = pool.submit(APPLY[how], second)
    wait_until_blocked(engine, pid)
    first.commit()
    with pytest.raises(OperationalError) as failure:
        later.result(20)
    assert sqlstate(failure.value) == SERIALIZATION_FAILURE
    second.rollback()
    assert APPLY[how](second) is False
    second.commit()
    assert row(engine).cents == 5


def test_a_row_that_comes_while_it_is_looked_for_is_no_duplicate(
    engine: Engine, sessions: Callable[..., Session], pool: ThreadPoolExecutor
) -> None:
    # The second waits for the row that the first deletes; what the first has put in its place has no memory yet.
    first, second = sessions(), sessions()
    assert add(first, "m-0", 100)
    pid = backend_pid(second.connection())
    later = pool.submit(add, second, "m-1", 5)
    wait_until_blocked(engine, pid)
    first.execute(text("DELETE FROM account WHERE account_id = 'ann'"))
    first.execute(text("INSERT INTO account (account_id, cents) VALUES ('ann', 1000)"))
    first.commit()
    assert later.result(20) is True
    second.commit()
    assert (row(engine).cents, row(engine).recent_message_ids) == (1005, ["m-1"])
    with engine.begin() as connection:
        assert add(connection, "m-0", 100), "the memory went with the row"


@pytest.mark.parametrize("level", LEVELS)
def test_sixteen_threads_with_the_same_messages_apply_each_once(
    engine: Engine, pool: ThreadPoolExecutor, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Account, "recent_message_ids_kept", 50)
    amounts = {f"m-{number}": 3**number for number in range(12)}
    leveled = engine.execution_options(isolation_level=level)

    def deliver_all(seed: int) -> Counter[str]:
        applied: Counter[str] = Counter()
        for message_id in random.Random(seed).sample(sorted(amounts), len(amounts)):
            while True:
                try:
                    with leveled.begin() as connection:
                        was_applied = add(connection, message_id, amounts[message_id])
                    break
                except OperationalError as error:
                    if sqlstate(error) != SERIALIZATION_FAILURE:
                        raise
            applied[message_id] += was_applied
        return applied

    total = sum(pool.map(deliver_all, range(16)), Counter())
    assert total == dict.fromkeys(amounts, 1)
    assert row(engine).cents == sum(amounts.values())
    assert sorted(row(engine).recent_message_ids) == sorted(amounts)


def test_sixteen_threads_with_events_out_of_order_leave_the_highest(engine: Engine, pool: ThreadPoolExecutor) -> None:
    def deliver_all(seed: int) -> list[int]:
        applied = []
        for event_id in random.Random(seed).sample(range(30), 30):
            with engine.begin() as connection:
                if replace(connection, event_id, event_id * 7):
                    applied.append(event_id)
        return applied

    applied = [event_id for part in pool.map(deliver_all, range(16)) for event_id in part]
    assert len(applied) == len(set(applied)), "none was applied twice"
    assert (row(engine).cents, row(engine).highest_event_ids) == (29 * 7, {"shop": 29})


# -- every kind of mapped class -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [("acme", 7), {"tenant": "acme", "number": 7}, {Order.number: 7, Order.tenant: "acme"}])
def test_keys_of_several_columns_and_names_that_sql_has_reserved(engine: Engine, key: Any) -> None:
    with Session(engine) as session, session.begin():
        orders = [Order(tenant=tenant, number=number) for tenant in ("acme", "other") for number in (7, 8)]
        session.add_all(orders)
        assert update_once(session, Order, key, "m-1", {"total": 5})
        assert not update_once(session, Order, key, "m-1", {Order.total: 6})
        assert update_if_newer(session, Order, key, "shop", 1, {Order.__table__.c["Group by"]: Order.total + 2})
        assert [order.total for order in orders] == [7, 0, 0, 0]


def test_a_schema_of_its_own(engine: Engine) -> None:
    with engine.begin() as connection:
        name = f"{connection.exec_driver_sql('SELECT current_schema()').scalar_one()}_b"
        connection.exec_driver_sql(f"CREATE SCHEMA {name}")
    try:

        class OwnBase(DeclarativeBase):
            pass

        class Ledger(RecentMessageIds, OwnBase):
            __tablename__ = "Ledger"
            __table_args__: ClassVar = {"schema": name}

            id: Mapped[int] = mapped_column(primary_key=True)
            total: Mapped[int] = mapped_column(default=0)

        OwnBase.metadata.create_all(engine)
        with Session(engine) as session, session.begin():
            session.add(Ledger(id=1))
            assert update_once(session, Ledger, 1, "m-1", {Ledger.total: Ledger.total + 1})
            assert not update_once(session, Ledger, 1, "m-1", {Ledger.total: Ledger.total + 1})
            with pytest.raises(EntityMissing, match=f"{name}.Ledger"):
                update_once(session, Ledger, 2, "m-1", {})
            assert session.get_one(Ledger, 1).total == 1
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DROP SCHEMA {name} CASCADE")


def test_classes_that_share_a_table_are_told_apart(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        guest, party = Guest(party_id=1), Party(party_id=2)
        session.add_all([guest, party])
        assert update_once(session, Guest, 1, "m-1", {Guest.visits: Guest.visits + 1, Guest.rating: 5})
        assert not update_once(session, Party, 1, "m-1", {Party.visits: 9}), "the same row by its root"
        with pytest.raises(EntityMissing):
            update_once(session, Guest, 2, "m-1", {Guest.rating: 5})
        assert (guest.visits, guest.rating, party.visits) == (1, 5, 0)


def test_a_class_that_joins_updates_the_table_that_remembers(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        member, guest = Member(party_id=1), Guest(party_id=2)
        session.add_all([member, guest])
        assert update_once(session, Member, 1, "m-1", {Member.visits: Member.visits + 1})
        assert not update_once(session, Member, 1, "m-1", {"visits": 9})
        assert update_if_newer(session, Member, 1, "gate", 4, {"visits": 8})
        assert member.visits == 8
        with pytest.raises(EntityMissing):
            update_once(session, Member, 2, "m-1", {"visits": 9})
        with pytest.raises(InvalidConfiguration, match="points is not in party"):
            update_once(session, Member, 1, "m-2", {Member.points: 1})


def test_a_joined_class_may_remember_in_its_own_table(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        meters = [Meter(device_id=1), Meter(device_id=2)]
        session.add_all(meters)
        assert update_once(session, Meter, 1, "m-1", {Meter.reading: Meter.reading + 5})
        assert not update_once(session, Meter, 1, "m-1", {Meter.reading: 9})
        assert [meter.reading for meter in meters] == [5, 0]
        with pytest.raises(InvalidConfiguration, match="label is not in meter"):
            update_once(session, Meter, 1, "m-2", {Meter.label: "x"})


def test_a_mapped_dataclass_declares_the_columns_itself(engine: Engine) -> None:
    class DataBase(MappedAsDataclass, DeclarativeBase):
        pass

    class Item(DataBase):
        __tablename__ = "item"

        item_id: Mapped[int] = mapped_column(primary_key=True)
        pieces: Mapped[int] = mapped_column(default=0)
        recent_message_ids: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}", init=False)
        highest_event_ids: Mapped[dict[str, int]] = mapped_column(JSONB, server_default="{}", init=False)

    DataBase.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(Item(1))
        assert update_once(session, Item, 1, "m-1", {"pieces": 5})
        assert not update_once(session, Item, 1, "m-1", {"pieces": 6})
        assert update_if_newer(session, Item, 1, "shop", 1, {"pieces": 7})
        assert (item := session.get_one(Item, 1)).pieces == 7
        assert (item.recent_message_ids, item.highest_event_ids) == (["m-1"], {"shop": 1})


def test_values_may_be_any_sql_expression(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        bob = select(Account.cents + 40).where(Account.account_id == "bob").scalar_subquery()
        assert update_once(session, Account, "bob", "m-1", {"cents": 2})
        assert update_once(session, Account, "ann", "m-1", {Account.cents: bob, "note": func.upper("x")})
    assert (row(engine).cents, row(engine).note) == (42, "X")


# -- migrations -----------------------------------------------------------------------------------------------------


def test_alembic_sees_the_columns_as_the_hosts_and_has_nothing_to_say_once_they_are_there(engine: Engine) -> None:
    options = {
        "compare_server_default": True,
        "include_object": lambda thing, name, kind, reflected, other: not (kind == "table" and reflected and not other),
    }
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
        connection.exec_driver_sql("ALTER TABLE account DROP recent_message_ids, DROP highest_event_ids")
        proposal = produce_migrations(context, Base.metadata)
        code = render_python_code(proposal.upgrade_ops)
        added = {change[3].name for change in compare_metadata(context, Base.metadata)}  # type: ignore[index]
    assert added == {"recent_message_ids", "highest_event_ids"}
    assert code.count("nullable=False") == code.count("server_default=sa.text(\"'{}'\")") == 2
