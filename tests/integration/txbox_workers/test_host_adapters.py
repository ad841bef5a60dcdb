"""Workers beside loaders that the host has registered: nothing is acked undone, and failures are counted and parked."""

import pytest
from psycopg.adapt import Loader
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.postgres.host_loaders import AsBytes, AsDecimal, AsText, Upper, register_loaders
from support.workers.memory_worker import messages, numbered, work_off
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


def test_failures_are_counted_and_parked_and_the_others_processed_once(loaded: Engine) -> None:
    def handle(_session: Session, message: Message) -> None:
        if message.id == "bad":
            raise ValueError("no")

    worker = work_off(MemorySource([*numbered(29), *messages("bad"), *numbered(1)]), loaded, handle, max_attempts=3)
    counts = {Outcome.PROCESSED: 29, Outcome.DUPLICATE: 1, Outcome.FAILED: 2, Outcome.DEAD: 1}
    assert worker.counts == counts
    (letter,) = DeadLetters(loaded).list()
    assert (letter.message_id, letter.attempts, len(letter.history)) == ("bad", 3, 3)
