"""Coroutine handlers: the same trials, by an ``AsyncWorker``; also from within an event loop."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import Column, Engine, MetaData, Table, Text, create_engine, select, text
from sqlalchemy.ext.asyncio import create_async_engine

from txbox import Message, Outcome
from txbox.leases import PostgresLedger
from txbox_testing import NotIdempotent, crash_at, deliver, try_every_point

from .conftest import ADD, BOOK, PURCHASE


async def apply(session: Any, message: Message) -> None:
    await session.execute(ADD)
    await asyncio.sleep(0)
    await session.execute(BOOK, {"note": message.id})


def test_a_mail_is_sent_again_and_what_is_in_the_transaction_is_there_once(engine: Engine) -> None:
    mails: list[str] = []

    async def handler(session: Any, message: Message) -> None:
        await apply(session, message)
        mails.append("to ann")

    with pytest.raises(NotIdempotent) as raised:
        try_every_point(handler, PURCHASE, engine=create_async_engine(engine.url), effects=mails)
    report = raised.value.report
    assert all(point.happened for point in report.points)
    names = {point.name for point in report.points}
    assert {'crash_at("statement", 2)', "lose_commit_answer()", "duplicate(at_once=True)", "overtake()"} <= names
    assert [(point.name, point.differences) for point in report.failed] == [
        (name, ("effects: 1 too many: 'to ann'",)) for name in ('crash_at("handled")', "lose_commit()")
    ]


def test_under_a_lease(engine: Engine) -> None:
    mails: list[str] = []

    async def handler(message: Message) -> None:
        mails.append("to ann")

    ledger = PostgresLedger("mailing", engine=engine)
    with pytest.raises(NotIdempotent) as raised:
        try_every_point(handler, PURCHASE, engine=engine, inbox=None, ledger=ledger, effects=mails)
    assert [point.name for point in raised.value.report.failed] == ['crash_at("handled")', "overtake()"]


def test_an_object_that_is_awaited_with_an_engine_that_has_options(engine: Engine) -> None:
    """Its tables are found by its search path, and by the map of its schemas."""
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA shop; CREATE TABLE shop.note (note text)")
    own = create_engine(
        engine.url,
        connect_args={"options": "-csearch_path=shop,public"},
        isolation_level="SERIALIZABLE",
        execution_options={"schema_translate_map": {"anywhere": "shop"}},
    )
    note = Table("note", MetaData(), Column("note", Text), schema="anywhere")

    class Handler:
        async def __call__(self, session: Any, message: Message) -> None:
            await session.execute(text("INSERT INTO note SELECT current_setting('transaction_isolation')"))
            assert (await session.scalars(select(note.c.note))).all() == ["serializable"]

    delivered = deliver(Handler(), PURCHASE, engine=own, fault=crash_at("handled"))
    assert delivered.outcome is Outcome.PROCESSED, delivered.error
    own.dispose()


def test_within_an_event_loop(engine: Engine) -> None:
    async def test() -> None:
        delivered = deliver(apply, PURCHASE, engine=engine, fault=crash_at("committed"))
        assert delivered.outcomes[-1] is Outcome.DUPLICATE
        await asyncio.sleep(0)

    asyncio.run(test())
