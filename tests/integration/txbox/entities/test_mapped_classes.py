"""Mapped classes of every kind whose rows remember their messages, and their migration."""

from typing import Any, ClassVar

import pytest
from alembic.autogenerate import compare_metadata, produce_migrations, render_python_code
from alembic.migration import MigrationContext
from sqlalchemy import Engine, Text, func, select
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column

from support.postgres.statements import run
from support.txbox.entities import Account, Base, Guest, Member, Meter, Order, Party, row
from txbox import EntityMissing, InvalidConfiguration
from txbox.entities import RecentMessageIds, update_if_newer, update_once


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
        run(engine, f"DROP SCHEMA {name} CASCADE")


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
