"""Outbox, watermarks and entities are the same in every style, too."""

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, func, select

from support.txbox.entities import Account, Base
from support.txbox.styles import Style
from txbox import InFlight, NotSendable, Outgoing, SchemaMissing
from txbox.errors import EntityMissing
from txbox.outbox import Subscriptions
from txbox.watermarks import Advance

pytestmark = pytest.mark.anyio

OWN = "own:somewhere"


def sent(engine: Engine) -> list[tuple[object, ...]]:
    """What the outbox holds, read without any code under test."""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT message_id, destination, key, headers, body, due_at IS NULL OR due_at <= now() "
            "FROM outbox_message ORDER BY position"
        )
        return [(*row[:3], row[3], bytes(row[4]), row[5]) for row in rows]


async def test_what_is_published_is_in_the_outbox_once_it_has_committed(engine: Engine, style: Style) -> None:
    outbox = style.outbox()
    headers = {"a": 'quoted " \\ ä', "%(b)s": "%%"}
    async with style.open() as lent:
        await style.call(outbox.check, lent)
        one = await style.call(outbox.publish, lent, OWN, b"\x00\xff body", "k", headers)
        given = await style.call(outbox.publish, lent, OWN, "text ä", message_id="m-1", delay=3600)
        many = await style.call(
            outbox.publish_many,
            lent,
            [
                Outgoing(OWN, b"\x00", key="k", headers=headers, delay=datetime.now(UTC) - timedelta(seconds=5)),
                Outgoing(OWN, "no key", delay=timedelta(hours=1)),
                Outgoing(OWN, "", key="k"),
            ],
        )
        assert await style.call(outbox.publish_many, lent, []) == []
        assert sent(engine) == []
        await style.commit(lent)
    assert given == "m-1"
    found = sent(engine)
    assert [row[0] for row in found] == [one, given, *many]
    assert found == [
        (one, OWN, "k", headers, b"\x00\xff body", True),
        ("m-1", OWN, None, {}, "text ä".encode(), False),
        (many[0], OWN, "k", headers, b"\x00", True),
        (many[1], OWN, None, {}, b"no key", False),
        (many[2], OWN, "k", {}, b"", True),
    ]
    assert json.dumps(found[0][3]) == json.dumps(headers)


async def test_what_cannot_be_published_is_refused(engine: Engine, style: Style) -> None:
    async with style.open() as lent:
        with pytest.raises(NotSendable):
            await style.call(style.outbox().publish, lent, OWN, "body", key="")
        with pytest.raises(TypeError):
            await style.call(style.outbox().publish, lent, OWN, {"a": 1})
        await style.call(style.outbox().publish, lent, OWN, "rolled back")
        await style.rollback(lent)
        elsewhere = style.outbox(schema="no such")
        for method, *arguments in ((elsewhere.publish, OWN, "body"), (elsewhere.check,)):
            with pytest.raises(SchemaMissing, match=r"outbox_message does not exist.*txbox db upgrade"):
                await style.call(method, lent, *arguments)
            await style.rollback(lent)
    assert sent(engine) == []


async def test_what_is_published_to_a_topic_is_there_for_each_subscriber(engine: Engine, style: Style) -> None:
    outbox = style.outbox()
    for subscriber in ("a", "b"):
        Subscriptions(engine).add("sold", subscriber)
    async with style.open() as lent:
        one = await style.call(outbox.publish, lent, "topic:sold", b"\x00", "k", {"a": "b"})
        messages = [Outgoing("topic:sold", "", delay=timedelta(hours=1)), Outgoing(OWN, "", key="k")]
        two, three = await style.call(outbox.publish_many, lent, messages)
        with pytest.raises(NotSendable, match=r"^topic:x has no subscribers"):
            await style.call(outbox.publish, lent, "topic:x", "")
        with pytest.raises(NotSendable, match=r"^topic:x has no subscribers"):
            await style.call(outbox.publish_many, lent, [*messages, Outgoing("topic:x", "")])
        await style.commit(lent)
    each = ("inbox:a", "inbox:b")
    assert sorted(sent(engine)) == sorted(
        [
            *((one, to, "k", {"a": "b"}, b"\x00", True) for to in each),
            *((two, to, None, {}, b"", False) for to in each),
            (three, OWN, "k", {}, b"", True),
        ],
    )


async def test_watermarks_advance(style: Style) -> None:
    marks = style.watermarks("billing")
    async with style.open() as lent:
        answers = [await style.call(marks.advance, lent, "account", "ann", sequence) for sequence in (1, 3, 2, 4)]
        assert answers == [Advance.APPLIED, Advance.APPLIED, Advance.STALE, Advance.APPLIED]
        assert await style.call(marks.advance, lent, "account", "ann", 6, insist=True) is Advance.GAP
        assert await style.call(marks.advance, lent, "account", "bob", 2, insist=True) is Advance.GAP
        assert await style.call(marks.advance, lent, "account", "bob", 1, insist=True) is Advance.APPLIED
        events = [("account", "ann", 5), ("account", "bob", 1), ("order", "%(x)s", 7), ("account", "ann", 5)]
        assert await style.call(marks.advance_many, lent, events) == [
            Advance.APPLIED,
            Advance.STALE,
            Advance.APPLIED,
            Advance.STALE,
        ]
        gaps = [("account", "ann", 7), ("account", "ann", 6), ("account", "eve", 1)]
        assert await style.call(marks.advance_many, lent, gaps, insist=True) == [
            Advance.GAP,
            Advance.APPLIED,
            Advance.APPLIED,
        ]
        await style.sql(lent, "CREATE TEMPORARY TABLE fresh_event (id text, position bigint) ON COMMIT DROP")
        await style.sql(lent, "INSERT INTO fresh_event VALUES ('ann', 6), ('ann', 7), ('zoe', 1)")
        left = await style.call(
            marks.advance_from, lent, aggregate_type="account", aggregate_id="id", sequence="position"
        )
        assert left == 2
        await style.commit(lent)


async def test_a_watermark_of_another_transaction_is_waited_for_in_bounds(style: Style) -> None:
    marks = style.watermarks("billing", wait_seconds=0.05)
    async with style.open() as first, style.open() as second:
        await style.call(marks.advance, first, "account", "ann", 1)
        with pytest.raises(InFlight):
            await style.call(marks.advance, second, "account", "ann", 2)


async def test_entities_remember_their_messages(engine: Engine, mapped: Style) -> None:
    style = mapped
    Base.metadata.create_all(engine)
    async with style.open() as lent:
        await style.sql(lent, "INSERT INTO account (account_id, cents) VALUES ('ann', 0)")
        more = {Account.cents: Account.cents + 5}
        answers = [
            await style.call(style.update_once, lent, Account, "ann", one, more) for one in ("m-1", "m-1", "m-2")
        ]
        assert answers == [True, False, True]
        price = {Account.note: "new"}
        for number, applied in ((3, True), (3, False), (2, False), (10, True)):
            assert await style.call(style.update_if_newer, lent, Account, "ann", "shop", number, price) is applied
        with pytest.raises(EntityMissing):
            await style.call(style.update_once, lent, Account, "nobody", "m-1", more)
        await style.commit(lent)
    with engine.connect() as connection:
        assert connection.execute(select(Account.cents, Account.note)).one() == (10, "new")


async def test_an_entity_counts_each_message_once_at_whatever_concurrency(engine: Engine, mapped: Style) -> None:
    style = mapped
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO account (account_id, cents) VALUES ('ann', 0)")

    async def update(message_id: str) -> bool:
        async with style.open() as lent:
            applied = await style.call(
                style.update_once, lent, Account, "ann", message_id, {Account.cents: Account.cents + 1}
            )
            await style.commit(lent)
            return bool(applied)

    answers = await asyncio.gather(*(update(f"m-{number % 3}") for number in range(9)))
    assert sum(answers) == 3
    with engine.connect() as connection:
        assert connection.execute(select(func.sum(Account.cents))).scalar_one() == 3
