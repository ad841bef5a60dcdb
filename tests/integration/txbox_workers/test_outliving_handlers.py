"""Threads that outlive the handler that has started them: their connection is neither closed nor used by others."""

import threading
from typing import Any

from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DBAPIError, InvalidRequestError, ResourceClosedError
from sqlalchemy.orm import Session

from support.workers.business import APPLY, Business, once
from support.workers.memory_worker import messages, work_off
from txbox import Message
from txbox_workers.memory_source import MemorySource

SLEEP = text("SELECT pg_sleep(30)")


def test_a_thread_within_a_statement_is_told_and_the_next_message_has_another_connection(
    engine: Engine, business: Business
) -> None:
    errors: list[Any] = []
    threads: list[threading.Thread] = []

    def outlive(session: Session, entered: threading.Event) -> None:
        session.execute(APPLY, {"id": "late", "body": ""})
        entered.set()
        try:
            session.execute(SLEEP)
        except DBAPIError as error:
            errors.append(error)

    def handle(session: Session, message: Message) -> None:
        if message.id == "bad":
            entered = threading.Event()
            threads.append(threading.Thread(target=outlive, args=[session, entered]))
            threads[-1].start()
            assert entered.wait(30)
            threads[-1].join(0.2)  # it is given up
        else:
            session.execute(APPLY, {"id": message.id, "body": ""})

    work_off(MemorySource(messages("a", "bad", "c")), engine, handle, max_attempts=2)
    for thread in threads:
        thread.join(15)
        assert not thread.is_alive(), "it does not wait for its statement's end"
    assert len(errors) == len(threads) >= 2
    assert business.applied() == once("ac")
    assert business.recorded() == {"a", "c"}
    assert business.letters() == {"bad": "failed"}


def test_a_thread_between_two_statements_has_no_second_one(engine: Engine, business: Business) -> None:
    errors: list[Any] = []
    free = threading.Event()
    threads: list[threading.Thread] = []

    def outlive(session: Session) -> None:
        connection = session.connection()
        free.wait(30)
        for late in (session, connection):
            try:
                late.execute(APPLY, {"id": "late", "body": ""})
            except InvalidRequestError as error:
                errors.append(error)

    def handle(session: Session, message: Message) -> None:
        session.execute(APPLY, {"id": message.id, "body": ""})
        if message.id == "a":
            threads.append(threading.Thread(target=outlive, args=[session]))
            threads[0].start()
        else:
            free.set()
            threads[0].join(15)

    work_off(MemorySource(messages("a", "b")), engine, handle, transactions="message")
    assert len(errors) == 2
    assert business.applied() == once("ab")
    assert business.recorded() == {"a", "b"}


def test_a_thread_that_comes_between_the_end_and_the_rollback_is_refused(engine: Engine, business: Business) -> None:
    errors: list[str] = []
    free = threading.Event()
    threads: list[threading.Thread] = []

    def outlive(connection: Connection) -> None:
        free.wait(30)
        try:
            connection.execute(APPLY, {"id": "late", "body": ""})
        except ResourceClosedError as error:
            errors.append(str(error))

    def handle(session: Session, message: Message) -> None:
        threads.append(threading.Thread(target=outlive, args=[session.connection()]))
        threads[-1].start()
        raise ValueError("it fails")

    def let_it_come(_: Connection) -> None:
        if threads:
            free.set()
            threads[-1].join(15)

    event.listen(engine, "rollback", let_it_come)
    work_off(MemorySource(messages("a")), engine, handle, max_attempts=1)
    assert ["is over" in error for error in errors] == [True]
    assert not business.applied()
    assert business.letters() == {"a": "failed"}
