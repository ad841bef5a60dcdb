"""Coroutine handlers: the same trials, by an ``AsyncWorker``; also from within an event loop."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import create_async_engine

from txbox import Message, Outcome
from txbox.leases import PostgresLedger
from txbox_testing import NotIdempotent, crash_at, deliver, try_every_point

from .conftest import ADD, BOOK, PURCHASE


async def apply(session: Any, message: Message) -> None:
    await session.execute(ADD)
    await asyncio.sleep(0)
    await session.execute(BOOK, {"note": message.id})


def test_what_is_in_the_transaction_passes_at_every_point(engine: Engine) -> None:
    report = try_every_point(apply, PURCHASE, engine=engine)
    assert all(point.happened for point in report.points)
    names = {point.name for point in report.points}
    assert {'crash_at("statement", 2)', "lose_commit_answer()", "duplicate(at_once=True)", "overtake()"} <= names


def test_a_mail_is_sent_again_with_an_engine_for_coroutines(engine: Engine) -> None:
    mails: list[str] = []

    async def handler(session: Any, message: Message) -> None:
        await apply(session, message)
        mails.append("to ann")

    with pytest.raises(NotIdempotent) as raised:
        try_every_point(handler, PURCHASE, engine=create_async_engine(engine.url), effects=mails)
    assert [point.name for point in raised.value.report.failed] == ['crash_at("handled")', "lose_commit()"]


def test_under_a_lease(engine: Engine) -> None:
    mails: list[str] = []

    async def handler(message: Message) -> None:
        mails.append("to ann")

    ledger = PostgresLedger("mailing", engine=engine)
    with pytest.raises(NotIdempotent) as raised:
        try_every_point(handler, PURCHASE, engine=engine, inbox=None, ledger=ledger, effects=mails)
    assert [point.name for point in raised.value.report.failed] == ['crash_at("handled")', "overtake()"]


def test_within_an_event_loop(engine: Engine) -> None:
    async def test() -> None:
        delivered = deliver(apply, PURCHASE, engine=engine, fault=crash_at("committed"))
        assert delivered.outcomes[-1] is Outcome.DUPLICATE
        await asyncio.sleep(0)

    asyncio.run(test())
