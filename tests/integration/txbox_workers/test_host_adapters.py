"""Workers beside loaders that the host has registered: nothing is acked undone, and failures are counted and parked."""

import pytest
from psycopg.adapt import Loader
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.postgres.host_loaders import AsBytes, AsDecimal, AsText, Upper, register_loaders
from support.workers.memory_worker import at_work, make, messages, numbered
from txbox import DeadLetters, Message, Outcome
from txbox_workers.memory_source import MemorySource

LOADERS: dict[str, tuple[str, type[Loader]]] = {
    "text as bytes": ("text", AsBytes),
    "text in upper case": ("text", Upper),
    "jsonb as text": ("jsonb", AsText),
    "int8 as Decimal": ("int8", AsDecimal),
    "int4 as Decimal": ("int4", AsDecimal),
}


@pytest.fixture(params=list(LOADERS))
def loaded(request: pytest.FixtureRequest, engine: Engine) -> Engine:
    name, loader = LOADERS[request.param]
    engine.connect().close()  # SQLAlchemy's own first look at a server wants texts
    engine.dispose()
    register_loaders(engine, {name: loader})
    return engine


def test_ten_messages_with_a_duplicate_are_handled(loaded: Engine) -> None:
    ran: list[str] = []

    def handle(_session: Session, message: Message) -> None:
        ran.append(message.id)

    sent = numbered(9)
    source = MemorySource([*sent, sent[0]])
    worker = make(source, loaded, handle)
    with at_work(worker):
        assert source.wait_until_empty(20)
    assert sorted(ran) == [message.id for message in sent]


def test_failures_are_counted_and_parked_and_the_others_processed(loaded: Engine) -> None:
    def handle(_session: Session, message: Message) -> None:
        if message.id == "bad":
            raise ValueError("no")

    source = MemorySource([*numbered(29), *messages("bad")])
    worker = make(source, loaded, handle, max_attempts=3)
    with at_work(worker):
        assert source.wait_until_empty(30)
    assert worker.counts[Outcome.PROCESSED] == 29
    assert worker.counts[Outcome.DEAD] == 1
    (letter,) = DeadLetters(loaded).list()
    assert (letter.message_id, letter.attempts, len(letter.history)) == ("bad", 3, 3)
    assert worker.counts[Outcome.FAILED] == 2
