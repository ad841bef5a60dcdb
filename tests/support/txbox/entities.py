"""Mapped classes whose rows remember their messages, and updates of them."""

from typing import Any, ClassVar

from sqlalchemy import Engine, ForeignKey, String, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from txbox.entities import HighestEventIds, RecentMessageIds, update_if_newer, update_once

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


def add(where: Any, message_id: str, cents: int = 1, account_id: str = "ann") -> bool:
    return update_once(where, Account, account_id, message_id, {Account.cents: Account.cents + cents})


def replace(where: Any, event_id: int | str, cents: int, source: str = "shop") -> bool:
    return update_if_newer(where, Account, "ann", source, event_id, {"cents": cents})


def row(engine: Engine, account_id: str = "ann") -> Any:
    with engine.connect() as connection:
        return connection.execute(select(Account.__table__).where(Account.account_id == account_id)).one()
