"""Rows that remember their messages: the statements, and what is refused before any of them runs."""

from typing import Any

import pytest
from sqlalchemy import create_mock_engine
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, column_property, mapped_column
from sqlalchemy.schema import CreateTable

from txbox import InvalidConfiguration, InvalidMessageId
from txbox.entities import MAX_KEPT, HighestEventIds, RecentMessageIds, update_if_newer, update_once

NOWHERE: Any = create_mock_engine("postgresql+psycopg://", lambda *_: None)


class Base(DeclarativeBase):
    pass


class Account(RecentMessageIds, HighestEventIds, Base):
    __tablename__ = "account"

    account_id: Mapped[str] = mapped_column(primary_key=True)
    cents: Mapped[int] = mapped_column()
    doubled: Mapped[int] = column_property(cents * 2)


class Forgetful(Base):
    __tablename__ = "forgetful"

    forgetful_id: Mapped[str] = mapped_column(primary_key=True)


def test_the_columns_are_ordinary_ones_of_the_hosts_table() -> None:
    table = str(CreateTable(Account.__table__).compile(dialect=postgresql.dialect()))
    assert "recent_message_ids TEXT[] DEFAULT '{}' NOT NULL" in table
    assert "highest_event_ids JSONB DEFAULT '{}' NOT NULL" in table


@pytest.mark.parametrize("kept", [0, -1, MAX_KEPT + 1, True, 2.5, "50", None])
@pytest.mark.parametrize("bases", [(RecentMessageIds, Base), (Base, RecentMessageIds)])
def test_a_bound_that_cannot_work_is_refused_when_the_class_is_made(bases: tuple[type, ...], kept: Any) -> None:
    with pytest.raises(InvalidConfiguration, match=r"Bad\.recent_message_ids_kept must be from 1 to 10000"):
        type("Bad", bases, {"__tablename__": "bad", "__abstract__": True, "recent_message_ids_kept": kept})


@pytest.mark.parametrize("kept", [1, MAX_KEPT])
def test_bounds_at_the_limits_work(kept: int) -> None:
    made = type("Good", (RecentMessageIds, Base), {"__abstract__": True, "recent_message_ids_kept": kept})
    assert made.recent_message_ids_kept == kept  # type: ignore[attr-defined]


def test_a_bound_that_was_broken_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Account, "recent_message_ids_kept", 0)
    with pytest.raises(InvalidConfiguration, match=r"^Account\.recent_message_ids_kept must be from 1 to"):
        update_once(NOWHERE, Account, "ann", "m-1", {})


@pytest.mark.parametrize("entity", [Forgetful, Account.__table__, Account(), RecentMessageIds, int, None])
def test_what_has_no_memory_is_refused(entity: Any) -> None:
    with pytest.raises(InvalidConfiguration, match=r"^entity must be a mapped class with RecentMessageIds"):
        update_once(NOWHERE, entity, "ann", "m-1", {})
    with pytest.raises(InvalidConfiguration, match=r"^entity must be a mapped class with HighestEventIds"):
        update_if_newer(NOWHERE, entity, "ann", "shop", 1, {})


@pytest.mark.parametrize(
    "key", [(), ("ann", "bob"), {}, {"account_id": "ann", "cents": 1}, {"cents": 1}, {"name": "ann"}, {7: "ann"}]
)
def test_a_key_that_is_not_the_primary_key_is_refused(key: Any) -> None:
    with pytest.raises(InvalidConfiguration, match=r"^key must "):
        update_once(NOWHERE, Account, key, "m-1", {})


@pytest.mark.parametrize(
    "values",
    [
        {"recent_message_ids": []},
        {Account.recent_message_ids: []},
        {"account_id": "bob"},
        {"sents": 1},
        {7: 1},
        {Forgetful.forgetful_id.expression: 1},
        {Account.doubled: 1},
    ],
)
def test_values_that_one_update_cannot_set_are_refused(values: Any) -> None:
    with pytest.raises(InvalidConfiguration, match=r"values must|is not in account"):
        update_once(NOWHERE, Account, "ann", "m-1", values)


@pytest.mark.parametrize("message_id", ["", "a\0b", "x" * 1001, "\ud800"])
def test_ids_that_cannot_be_kept_are_refused(message_id: str) -> None:
    with pytest.raises(InvalidMessageId):
        update_once(NOWHERE, Account, "ann", message_id, {})
    with pytest.raises(InvalidMessageId):
        update_if_newer(NOWHERE, Account, "ann", "shop", message_id, {})


def test_what_is_no_connection_is_refused() -> None:
    with pytest.raises(TypeError, match="a Connection or Session of SQLAlchemy"):
        update_once(NOWHERE, Account, "ann", "m-1", {})
