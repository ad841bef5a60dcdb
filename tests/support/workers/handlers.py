"""What handlers do with the session they are given: what is tolerated, what is refused, and how they fail."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from support.workers.business import ADD, apply
from txbox import Message, TransactionEnded
from txbox.postgres.drivers.greenlets import GreenletEvent

APPLY_BAD = text("INSERT INTO effect (message_id, body) VALUES ('bad', 'again')")


def driver(session: Session) -> Any:
    """The driver's connection, behind everything that watches."""
    return session.connection().connection.dbapi_connection


def commits_and_goes_on(session: Session) -> None:
    session.commit()
    session.execute(ADD, {"account": 1, "amount": 1})
    session.commit()


def works_in_a_savepoint(session: Session) -> None:
    with session.begin_nested():
        session.execute(ADD, {"account": 1, "amount": 1})


def undoes_a_savepoint(session: Session) -> None:
    savepoint = session.begin_nested()
    session.execute(ADD, {"account": 1, "amount": 100})
    savepoint.rollback()
    session.execute(ADD, {"account": 1, "amount": 1})


def leaves_a_savepoint_open(session: Session) -> None:
    session.begin_nested()
    session.execute(ADD, {"account": 1, "amount": 1})


def leaves_a_savepoint_of_the_connection_open(session: Session) -> None:
    session.connection().begin_nested()
    session.execute(ADD, {"account": 1, "amount": 1})


def swallows_an_error_within_a_savepoint(session: Session) -> None:
    try:
        with session.begin_nested():
            session.execute(text("SELECT 1 / 0"))
    except DBAPIError:
        session.execute(ADD, {"account": 1, "amount": 1})


TOLERATED = [
    pytest.param(lambda session: session.commit(), id="commits the session"),
    commits_and_goes_on,
    works_in_a_savepoint,
    undoes_a_savepoint,
    leaves_a_savepoint_open,
    leaves_a_savepoint_of_the_connection_open,
    swallows_an_error_within_a_savepoint,
    pytest.param(lambda session: session.close(), id="closes the session"),
]


def rolls_the_session_back(session: Session) -> None:
    session.rollback()


def rolls_back_and_goes_on(session: Session) -> None:
    session.rollback()
    session.execute(APPLY_BAD)


def rolls_back_and_commits(session: Session) -> None:
    session.rollback()
    session.execute(APPLY_BAD)
    session.commit()


def commits_the_connection(session: Session) -> None:
    session.connection().commit()


def commits_the_connection_and_hides_it(session: Session) -> None:
    connection = session.connection()
    try:
        connection.commit()
    except TransactionEnded:
        connection.rollback()
        connection.execute(APPLY_BAD)


def commits_by_sql(session: Session) -> None:
    session.execute(text("  commit and chain"))


def commits_behind_everything_and_goes_on(session: Session) -> None:
    driver(session).commit()
    session.execute(APPLY_BAD)


def commits_behind_everything_and_hides_it(session: Session) -> None:
    with suppress(Exception):
        driver(session).commit()
    session.execute(APPLY_BAD)


def commits_and_chains_behind_everything(session: Session) -> None:
    with suppress(Exception):
        driver(session).execute("COMMIT AND CHAIN")
    session.execute(APPLY_BAD)


def rolls_back_behind_everything_and_goes_on(session: Session) -> None:
    driver(session).rollback()
    session.execute(APPLY_BAD)


def rolls_back_and_chains_behind_everything(session: Session) -> None:
    driver(session).execute("ROLLBACK AND CHAIN")
    session.execute(APPLY_BAD)


def commits_each_statement_from_now_on(session: Session) -> None:
    connection = driver(session)
    connection.rollback()
    connection.autocommit = True


def wraps_the_refusal_of_its_commit(session: Session) -> None:
    try:
        driver(session).commit()
    except Exception as error:
        raise ValueError("something of mine went wrong") from error


BEHIND_EVERYTHING = [
    pytest.param(lambda session: driver(session).rollback(), id="rolls back behind everything"),
    pytest.param(lambda session: driver(session).commit(), id="commits behind everything"),
    pytest.param(lambda session: driver(session).execute("COMMIT"), id="commits by sql behind everything"),
    pytest.param(
        lambda session: driver(session).cursor().execute(r"SELECT E'\''; COMMIT; SELECT 'x'"),
        id="commits within a text behind everything",
    ),
    pytest.param(
        lambda session: session.connection().exec_driver_sql(r"SELECT E'\''; COMMIT; SELECT 'x'"),
        id="commits within a text",
    ),
    commits_behind_everything_and_goes_on,
    commits_behind_everything_and_hides_it,
    commits_and_chains_behind_everything,
    rolls_back_behind_everything_and_goes_on,
    rolls_back_and_chains_behind_everything,
    wraps_the_refusal_of_its_commit,
]


def swallows_the_error_of_a_statement(session: Session) -> None:
    with suppress(DBAPIError):
        session.execute(text("SELECT 1 / 0"))


def swallows_the_error_of_a_flush(session: Session) -> None:
    with suppress(DBAPIError):
        session.connection().exec_driver_sql("INSERT INTO account VALUES (1, 0)")


def leaves_the_process(session: Session) -> None:
    raise SystemExit(1)


def is_cancelled(session: Session) -> None:
    raise asyncio.CancelledError


def raises_what_cannot_be_printed(session: Session) -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    raise Silent


REFUSED = [
    rolls_the_session_back,
    rolls_back_and_goes_on,
    rolls_back_and_commits,
    commits_the_connection,
    commits_the_connection_and_hides_it,
    commits_by_sql,
    pytest.param(lambda session: session.execute(text("ROLLBACK")), id="rolls back by sql"),
    swallows_the_error_of_a_statement,
    swallows_the_error_of_a_flush,
    pytest.param(lambda session: session.execute(text("/* settle */ COMMIT")), id="commits behind a comment"),
    pytest.param(
        lambda session: session.connection().exec_driver_sql("SELECT 1; COMMIT; BEGIN"),
        id="commits behind another statement",
    ),
    leaves_the_process,
    is_cancelled,
    raises_what_cannot_be_printed,
]


def with_bad(behaviour: Callable[[Session], None]) -> Callable[[Session, Message], None]:
    """A handler that applies every message, and behaves like this for the one that is called bad."""

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id == "bad":
            behaviour(session)

    return handle


def in_modes(behaviours: Sequence[Any], *everywhere: str) -> pytest.MarkDecorator:
    """Parametrize by ``behaviour`` and ``mode``: all in batches, those of these names in the other modes, too.

    All modes have their transactions from one place, which looks at what has become of them. So of behaviours that it
    notices in the same way, and that differ in their spelling, one in the other modes is enough.
    """
    named = {one.id: one.values[0] for one in behaviours if not callable(one)}
    named |= {one.__name__: one for one in behaviours if callable(one)}
    pairs = [(name, "batch") for name in named]
    pairs += [(name, mode) for name in everywhere for mode in ("message", "batch_handler")]
    return pytest.mark.parametrize(
        ("behaviour", "mode"), [pytest.param(named[name], mode, id=f"{name}-{mode}") for name, mode in pairs]
    )


def handler_options(handle: Callable[[Session, Message], None], mode: str) -> dict[str, Any]:
    """The options of a worker that runs a handler in this mode: batch, message or batch_handler."""

    def handle_batch(session: Session, batch: Sequence[Message]) -> None:
        for message in batch:
            handle(session, message)

    if mode == "batch_handler":
        return {"batch_handler": handle_batch}
    return {"handler": handle, "transactions": mode}


class Hanging:
    """A handler that applies each message, and waits to be let go in these, or in all. It blocks no event loop."""

    def __init__(self, *ids: str) -> None:
        self._ids = ids
        self.begun = threading.Event()
        self.go = GreenletEvent()

    def __call__(self, session: Session, message: Message) -> None:
        apply(session, message)
        if not self._ids or message.id in self._ids:
            self.begun.set()
            assert self.go.wait(60)


def failing_first(*ids: str, times: int = 2) -> Callable[[Session, Message], None]:
    """A handler that fails these until they have failed twice: in the batch, and alone."""
    left = dict.fromkeys(ids, times)

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if left.get(message.id):
            left[message.id] -= 1
            raise ValueError("not yet")

    return handle


def failing_always(session: Session, message: Message) -> None:
    apply(session, message)
    raise ValueError("always")
