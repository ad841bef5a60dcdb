"""The inbox is the same in every style: what it answers and raises, and what two transactions make of each other."""

import asyncio
import random
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine

from support.postgres.blocking import wait_until_blocked
from support.txbox.horizon import LONG_AGO, forget
from support.txbox.inbox import recorded
from support.txbox.styles import Style
from txbox import Expired, InFlight, InvalidMessageId, Mismatch, NotInTransaction, Recorded, SchemaMissing
from txbox.postgres.sqlstates import DATABASE_ERRORS, SERIALIZATION_FAILURE, sqlstate

pytestmark = pytest.mark.anyio

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


async def test_a_message_is_first_once(engine: Engine, style: Style) -> None:
    inbox = style.inbox("billing")
    answers = []
    for isolation in [LEVELS[0], *LEVELS]:
        async with style.open(isolation) as lent:
            answers.append(await style.call(inbox.record, lent, "m-1", b"body"))
            await style.commit(lent)
    assert answers == [True, False, False, False]
    assert recorded(engine) == [("billing", "m-1")]


async def test_a_rollback_leaves_nothing(engine: Engine, style: Style) -> None:
    async with style.open() as lent:
        assert await style.call(style.inbox("billing").record, lent, "m-1") is True
        assert await style.call(style.inbox("billing").record, lent, "m-1") is False, "in the same transaction"
        await style.rollback(lent)
    assert recorded(engine) == []


async def test_a_batch_says_which_are_first(engine: Engine, style: Style) -> None:
    inbox = style.inbox("billing")
    odd = ["ä", 'quoted " and \\', "%(name)s %%", "{a,b}", "\U0001f600", "a", "B", "NULL", " ", '","', "\n"]
    async with style.open() as lent:
        assert await style.call(inbox.record_many, lent, odd) == set(odd)
        assert await style.call(inbox.record_many, lent, [*odd, "new"]) == {"new"}
        assert await style.call(inbox.record_many, lent, []) == set()
        assert await style.call(inbox.unrecord, lent, ["a", "nothing"]) == 1
        assert await style.call(inbox.sort_out, lent, ["a", "B"]) == Recorded(frozenset({"a"}), frozenset())
        await style.commit(lent)
    assert [message_id for _, message_id in recorded(engine)] == sorted([*odd, "new"], key=str.encode)


async def test_another_body_is_a_mismatch(style: Style) -> None:
    inbox = style.inbox("billing", fingerprint=True)
    async with style.open() as lent:
        assert await style.call(inbox.record, lent, "m-1", b"Zo\xc3\xab") is True
        assert await style.call(inbox.record, lent, "m-1", "Zoë") is False, "text counts as its UTF-8"
        with pytest.raises(Mismatch, match="billing has already processed m-1 with another body") as caught:
            await style.call(inbox.record, lent, "m-1", b"other")
        assert caught.value.message_ids == ("m-1",)
        batch = {"m-1": b"other", "m-2": b"", "m-3": "a"}
        assert await style.call(inbox.sort_out, lent, batch) == Recorded(frozenset({"m-2", "m-3"}), frozenset({"m-1"}))
        with pytest.raises(Mismatch) as caught:
            await style.call(inbox.record_many, lent, {"m-1": "Zoë", "m-2": b"other", "m-3": "b", "m-4": ""})
        assert caught.value.message_ids == ("m-2", "m-3")


async def test_what_is_too_old_to_judge_is_expired(engine: Engine, style: Style) -> None:
    inbox = style.inbox("billing")
    async with style.open() as lent:
        await style.call(inbox.record, lent, "old")
        await style.commit(lent)
    forget(engine, "old")
    async with style.open() as lent:
        with pytest.raises(Expired) as caught:
            await style.call(inbox.record, lent, "old", sent_at=LONG_AGO)
        assert caught.value.message_ids == ("old",)
        await style.rollback(lent)
        with pytest.raises(Expired):
            await style.call(inbox.record_many, lent, ["old"], sent_at={"old": LONG_AGO})
        found = await style.call(inbox.sort_out, lent, ["old", "new"], sent_at={"old": LONG_AGO})
        assert found.first == {"new"}
        assert found.expired == {"old"}
        recently = datetime.now(UTC) - timedelta(minutes=1)
        assert await style.call(inbox.record, lent, "other", sent_at=recently) is True


async def test_a_transaction_that_does_not_end_is_waited_for_in_bounds(engine: Engine, style: Style) -> None:
    inbox = style.inbox("billing", wait_seconds=0.05)
    async with style.open() as first, style.open() as second:
        await style.call(inbox.record, first, "m-1")
        with pytest.raises(InFlight) as caught:
            await style.call(inbox.record, second, "m-1")
        assert caught.value.message_ids == ("m-1",)
        await style.rollback(second)
        with pytest.raises(InFlight):
            await style.call(inbox.record_many, second, ["m-0", "m-1"])
        await style.rollback(second)
        assert await style.sql(second, "SHOW lock_timeout") == "0", "the setting is back"
        await style.commit(first)
        assert await style.call(inbox.record, second, "m-1") is False


async def test_who_waits_for_a_commit_finds_a_duplicate_or_runs_again(engine: Engine, style: Style) -> None:
    inbox = style.inbox("billing", wait_seconds=60)
    for isolation in LEVELS:
        async with style.open(isolation) as first, style.open(isolation) as second:
            pid = await style.sql(second, "SELECT pg_backend_pid()")  # takes the snapshot, too
            await style.call(inbox.record, first, isolation)
            waiting = asyncio.create_task(style.call(inbox.record, second, isolation))
            await asyncio.to_thread(wait_until_blocked, engine, pid)
            await style.commit(first)
            if isolation == "READ COMMITTED":
                assert await waiting is False
            else:
                with pytest.raises(DATABASE_ERRORS) as caught:
                    await waiting
                assert sqlstate(caught.value) == SERIALIZATION_FAILURE
                await style.rollback(second)
                assert await style.call(inbox.record, second, isolation) is False
    assert recorded(engine) == [("billing", isolation) for isolation in sorted(LEVELS)]


async def test_eight_transactions_at_once_apply_each_message_once(engine: Engine, style: Style) -> None:
    inbox = style.inbox("billing", wait_seconds=60)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE effect (message_id text)")

    async def work(number: int) -> None:
        dice = random.Random(number)
        async with style.open() as lent:
            for _ in range(10):
                ids = {f"m-{dice.randrange(60)}" for _ in range(20)}
                for message_id in await style.call(inbox.record_many, lent, ids):
                    await style.sql(lent, f"INSERT INTO effect VALUES ('{message_id}')")
                await style.commit(lent)

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(work(number))
    with engine.connect() as connection:
        effects = Counter(connection.exec_driver_sql("SELECT message_id FROM effect").scalars())
    expected = {
        f"m-{dice.randrange(60)}" for number in range(8) if (dice := random.Random(number)) for _ in range(10 * 20)
    }
    assert effects == Counter(expected)
    assert {message_id for _, message_id in recorded(engine)} == expected


async def test_what_cannot_be_used_is_refused(style: Style) -> None:
    inbox = style.inbox("billing")
    async with style.open() as lent:
        await style.call(inbox.check, lent)
        for method, wrong in ((inbox.record, ""), (inbox.record_many, ["m-0", "a\0b"])):
            with pytest.raises(InvalidMessageId):
                await style.call(method, lent, wrong)
        with pytest.raises(TypeError, match="one: 'abc'"):
            await style.call(inbox.record_many, lent, "abc")
        assert await style.call(inbox.record, lent, "m-1") is True, "the transaction goes on"
        await style.rollback(lent)
        elsewhere = style.inbox("billing", schema="no such")
        for method, *arguments in ((elsewhere.record, "m-1"), (elsewhere.record_many, ["m-1"]), (elsewhere.check,)):
            with pytest.raises(SchemaMissing, match="txbox db upgrade") as caught:
                await style.call(method, lent, *arguments)
            assert caught.value.table == '"no such".processed_message'
            await style.rollback(lent)


async def test_errors_of_the_database_pass_through(style: Style) -> None:
    async with style.open() as lent:
        await style.sql(lent, "SET TRANSACTION READ ONLY")
        with pytest.raises(DATABASE_ERRORS) as caught:
            await style.call(style.inbox("billing").record, lent, "m-1")
        assert sqlstate(caught.value) == "25006"


async def test_what_commits_every_statement_is_refused(engine: Engine, style: Style) -> None:
    inbox = style.inbox("billing")
    is_psycopg = not style.has_mapped_classes
    async with style.open() if is_psycopg else style.open("AUTOCOMMIT") as lent:
        if is_psycopg:
            await style.call(lent.set_autocommit, True)
        for method, *arguments in (
            *((inbox.record, "m-1"), (inbox.unrecord, ["m-1"]), (inbox.check,)),
            *((inbox.record_many, ["m-1"]), (inbox.record_many, []), (inbox.sort_out, ["m-1"])),
        ):
            with pytest.raises(NotInTransaction):
                await style.call(method, lent, *arguments)
        if is_psycopg:  # a block begins a transaction, also in autocommit mode
            await style.sql(lent, "BEGIN")
            assert await style.call(inbox.record, lent, "m-1") is True
            await style.sql(lent, "ROLLBACK")
    assert recorded(engine) == []
