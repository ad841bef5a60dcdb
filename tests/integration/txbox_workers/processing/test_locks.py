"""Batches whose messages name what they lock: no deadlock, and what is wrong with a name is its message's failure."""

import random
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.txbox.events import Kept
from support.workers.business import ADD, Business, apply, once
from support.workers.memory_worker import at_work, make, messages, work_off
from txbox import Inbox, InvalidConfiguration, Message, SqlEffect
from txbox.instrumentation import Retried
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

ROWS = 4


def row_of(message: Message) -> int:
    return int(message.id[-1]) % ROWS


def on_rows(session: Session, message: Message) -> None:
    session.execute(ADD, {"account": 10 + row_of(message), "amount": 1})
    apply(session, message)


def all_rows(session: Session, messages: list[Message]) -> None:
    for message in messages:
        on_rows(session, message)


@pytest.fixture
def rows(engine: Engine, business: Business) -> Business:
    with engine.begin() as connection:
        connection.exec_driver_sql(f"INSERT INTO account SELECT 10 + n, 0 FROM generate_series(0, {ROWS - 1}) AS n")
    return business


@pytest.mark.parametrize(
    ("options", "may_deadlock"),
    [
        ({"handler": on_rows}, True),
        ({"handler": on_rows, "locks": row_of}, False),
        ({"batch_handler": all_rows, "locks": row_of}, False),
    ],
    ids=["without", "handler", "batch handler"],
)
def test_batches_that_lock_in_one_order_do_not_deadlock(
    engine: Engine, rows: Business, options: dict[str, Any], may_deadlock: bool
) -> None:
    sent = [Message(f"m{number:04}", b"{}") for number in range(400)]
    random.Random(3).shuffle(sent)
    source, kept = MemorySource(sent), Kept()
    options = {"handler": None, **options} if "batch_handler" not in options else options
    with at_work(make(source, engine, threads=4, hooks=[kept], **options)):
        assert source.wait_until_empty(60)
    assert rows.applied() == once(one.id for one in sent)
    assert sum(rows.balance(10 + row) for row in range(ROWS)) == len(sent)
    assert bool(kept.of(Retried)) is may_deadlock


def test_what_cannot_be_named_is_the_failure_of_its_message(engine: Engine, business: Business) -> None:
    def locks(message: Message) -> str:
        if message.id == "bad":
            raise ValueError("of this message, no row is known")
        return message.id

    work_off(MemorySource(messages("a", "bad", "c")), engine, max_attempts=2, locks=locks)
    assert business.applied() == once("ac")
    assert business.letters() == {"bad": "failed"}


@pytest.mark.parametrize(
    "options",
    [{"locks": "account"}, {"locks": row_of, "effect": SqlEffect.of("SELECT 1 FROM fresh_event", fields="x int")}],
)
def test_what_cannot_work_is_refused(engine: Engine, options: dict[str, Any]) -> None:
    handler = {} if "effect" in options else {"handler": apply}
    with pytest.raises(InvalidConfiguration, match="locks"):
        Worker(MemorySource(), inbox=Inbox("billing"), engine=engine, **handler, **options)
