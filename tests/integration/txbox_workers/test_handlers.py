"""Handlers that misbehave in the transaction that the worker lends them."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session, sessionmaker

from support.workers.business import Business, apply, once
from support.workers.handlers import (
    BEHIND_EVERYTHING,
    REFUSED,
    TOLERATED,
    commits_by_sql,
    commits_each_statement_from_now_on,
    commits_the_connection,
    handler_options,
    in_modes,
    rolls_the_session_back,
    swallows_the_error_of_a_statement,
    with_bad,
    wraps_the_refusal_of_its_commit,
)
from support.workers.memory_worker import messages, work_off
from txbox import Message, Outcome
from txbox_workers.memory_source import MemorySource


@in_modes(TOLERATED, "commits the session", "leaves_a_savepoint_open", "closes the session")
def test_a_handler_that_does_as_it_would_with_its_own_session_is_understood(
    engine: Engine, business: Business, behaviour: Callable[[Session], None], mode: str
) -> None:
    work_off(
        MemorySource(messages("a", "bad", "c")), engine, max_attempts=2, **handler_options(with_bad(behaviour), mode)
    )
    assert business.applied() == once(["a", "bad", "c"])
    assert business.letters() == {}
    if "ADD" in behaviour.__code__.co_names:
        assert business.balance() == 1


@in_modes(
    REFUSED,
    "rolls_back_and_commits",
    "commits_the_connection_and_hides_it",
    "commits behind another statement",
    "swallows_the_error_of_a_statement",
    "leaves_the_process",
)
def test_a_handler_that_undoes_or_ends_the_transaction_fails_alone(
    engine: Engine, business: Business, behaviour: Callable[[Session], None], mode: str
) -> None:
    source = MemorySource(messages("a", "bad", "c"))
    worker = work_off(source, engine, max_attempts=2, **handler_options(with_bad(behaviour), mode))
    assert business.applied() == once("ac")
    assert business.balance() == 0
    assert business.recorded() == {"a", "c"}, "what is recorded was applied, and nothing else"
    assert business.letters() == {"bad": "failed"}
    assert worker.counts == {Outcome.PROCESSED: 2, Outcome.FAILED: 1, Outcome.DEAD: 1}


def test_a_handler_may_commit_a_connection_of_its_own(engine: Engine, business: Business) -> None:
    def handle(session: Session, message: Message) -> None:
        with session.get_bind().engine.begin() as beside:
            beside.exec_driver_sql("UPDATE account SET balance = balance + 1 WHERE account_id = 2")
        apply(session, message)

    work_off(MemorySource(messages("a", "b")), engine, handle)
    assert business.applied() == once("ab")
    assert business.balance(2) == 2


@pytest.mark.parametrize("leaves", ["SET LOCAL search_path TO pg_temp", "SET LOCAL ROLE pg_monitor"])
def test_what_a_handler_leaves_behind_in_its_transaction_does_not_harm_the_next_attempt(
    engine: Engine, business: Business, leaves: str
) -> None:
    runs: list[str] = []

    def handle(session: Session, message: Message) -> None:
        runs.append(message.id)
        apply(session, message)
        if len(runs) == 1:
            raise ValueError("a passing trouble")
        session.execute(text(leaves))

    work_off(MemorySource(messages("a")), engine, handle, max_attempts=3)
    assert business.applied() == once("a")
    assert business.failing() == {}
    assert len(runs) == 2


@in_modes(
    BEHIND_EVERYTHING,
    "commits behind everything",
    "commits_behind_everything_and_hides_it",
    "commits_and_chains_behind_everything",
    "rolls_back_behind_everything_and_goes_on",
    "wraps_the_refusal_of_its_commit",
)
def test_a_handler_that_ends_the_transaction_behind_sqlalchemy_loses_nothing(
    engine: Engine, business: Business, behaviour: Callable[[Session], None], mode: str
) -> None:
    source = MemorySource(messages("bad", "b", "c", "d"))
    worker = work_off(source, engine, max_attempts=2, **handler_options(with_bad(behaviour), mode))
    assert business.applied() == once("bcd")
    assert business.recorded() == {"b", "c", "d"}, "what is recorded was applied, and nothing else"
    assert business.letters() == {"bad": "failed"}
    assert worker.counts == {Outcome.PROCESSED: 3, Outcome.FAILED: 1, Outcome.DEAD: 1}


def test_what_a_handler_commits_after_a_rollback_of_its_own_is_not_the_workers(
    engine: Engine, business: Business
) -> None:
    def roll_back_and_commit(session: Session) -> None:
        driver = session.connection().connection.driver_connection
        driver.rollback()
        driver.execute("UPDATE account SET balance = balance + 1 WHERE account_id = 2")
        driver.commit()

    work_off(MemorySource(messages("a", "bad", "c", "d")), engine, with_bad(roll_back_and_commit), max_attempts=2)
    assert business.applied() == once("acd")
    assert business.recorded() == {"a", "c", "d"}
    assert business.letters() == {"bad": "failed"}
    assert business.balance(2) == 3, "once for each run: in the batch, and twice alone"


def test_a_connection_that_a_handler_has_left_in_autocommit_is_used_no_more(engine: Engine, business: Business) -> None:
    source = MemorySource(messages("bad", "b", "c", "d"))
    work_off(source, engine, with_bad(commits_each_statement_from_now_on), max_attempts=2)
    assert business.applied() == once("bcd")
    assert business.recorded() == {"b", "c", "d"}


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_commit_in_the_first_handler_and_an_error_in_the_last_lose_nothing(
    schema_url: str, business: Business, level: str
) -> None:
    engine = create_engine(schema_url, isolation_level=level, pool_size=1, max_overflow=0)
    seen: list[str] = []

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        seen.append(session.execute(text("SHOW transaction_isolation")).scalar_one().upper())
        if message.id == "a":
            with suppress(Exception):
                session.connection().connection.dbapi_connection.commit()
        if message.id == "f":
            raise ValueError("the last of them")

    work_off(MemorySource(messages(*"abcdef")), engine, handle, max_attempts=1)
    engine.dispose()
    assert set(seen) == {level}
    assert business.applied() == once("bcde")
    assert business.recorded() == set("bcde")
    assert business.letters() == {"a": "failed", "f": "failed"}


def test_a_handler_that_commits_is_told_what_is_wrong(
    engine: Engine, business: Business, caplog: pytest.LogCaptureFixture
) -> None:
    work_off(MemorySource(messages("bad")), engine, with_bad(wraps_the_refusal_of_its_commit), max_attempts=1)
    (said,) = [record.getMessage() for record in caplog.records if "bad" in record.getMessage()]
    assert "TransactionEnded: the handler ended the worker's transaction; leave commit" in said


@pytest.mark.usefixtures("without_reports")
def test_what_a_listener_of_the_hosts_does_at_the_commit_is_part_of_it(schema_url: str, business: Business) -> None:
    engine = create_engine(schema_url)
    number = text("SELECT pg_current_xact_id_if_assigned()::text")
    handled: list[str] = []
    heard: list[str] = []

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        handled.append(session.execute(number).scalar_one())

    event.listen(engine, "commit", lambda connection: heard.append(connection.execute(number).scalar_one()))
    work_off(MemorySource(messages("a")), engine, handle)
    engine.dispose()
    assert business.applied() == once("a")
    assert heard == handled


@pytest.mark.parametrize("behaviour", [commits_the_connection, commits_by_sql, swallows_the_error_of_a_statement])
@pytest.mark.parametrize("reset", [None, "commit"])
def test_nothing_half_done_stays_in_a_pool_that_does_not_roll_back(
    schema_url: str, business: Business, reset: Any, behaviour: Callable[[Session], None]
) -> None:
    engine = create_engine(schema_url, pool_size=1, max_overflow=0, pool_reset_on_return=reset)
    work_off(MemorySource(messages("a", "bad", "c")), engine, with_bad(behaviour), max_attempts=1)
    work_off(MemorySource(messages("d")), engine)
    engine.dispose()
    assert business.applied() == once("acd")
    assert business.recorded() == {"a", "c", "d"}


@pytest.mark.parametrize("how", ["close", "invalidate", "give back"])
def test_a_handler_that_closes_its_connection_is_parked_and_nobody_with_it(
    engine: Engine, business: Business, how: str
) -> None:
    runs = []

    def close(session: Session) -> None:
        runs.append(1)
        if how == "give back":
            session.connection().connection.close()
        else:
            getattr(session.connection(), how)()

    work_off(MemorySource(messages("a", "bad", "c")), engine, with_bad(close), max_attempts=3)
    assert business.applied() == once("ac")
    assert business.letters() == {"bad": "failed"}
    assert len(runs) == 4, "once more in the batch"


def opens_a_stream(driver: Any) -> Callable[[], Any]:
    rows = driver.cursor().stream("SELECT generate_series(1, 100000)")
    next(rows)
    return rows.close


def opens_a_copy(driver: Any) -> Callable[[], Any]:
    copy = driver.cursor().copy("COPY effect (message_id) FROM STDIN")
    copy.__enter__().write_row(("stray",))
    return partial(copy.__exit__, None, None, None)


def opens_a_pipeline(driver: Any) -> Callable[[], Any]:
    pipeline = driver.pipeline()
    pipeline.__enter__()
    return partial(pipeline.__exit__, None, None, None)


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("opens", [opens_a_stream, opens_a_copy, opens_a_pipeline])
def test_a_statement_that_a_handler_leaves_open_keeps_nobody_waiting(
    engine: Engine, business: Business, opens: Callable[[Any], Callable[[], Any]], raises: bool
) -> None:
    kept = []

    def leave_open(session: Session) -> None:
        kept.append(opens(session.connection().connection.driver_connection))
        if raises:
            raise ValueError("and the traceback keeps it")

    work_off(MemorySource(messages("a", "bad", "c")), engine, with_bad(leave_open), max_attempts=2)
    for end in kept:  # the garbage collector would, in the middle of another test
        with suppress(Exception):
            end()
    assert business.applied() == once("ac")
    assert business.letters() == {"bad": "failed"}


def test_sessions_are_made_by_the_factory_of_the_host(engine: Engine, business: Business) -> None:
    class HostSession(Session):
        pass

    seen = []

    def handle(session: Session, message: Message) -> None:
        seen.append((type(session), session.expire_on_commit))
        apply(session, message)

    factory = sessionmaker(class_=HostSession, expire_on_commit=False)
    work_off(MemorySource(messages("a")), engine, handle, session_factory=factory)
    assert len(seen) == 1
    assert issubclass(seen[0][0], HostSession)
    assert seen[0][1] is False
    assert business.applied() == once("a")


def test_one_connection_is_enough_for_one_thread(schema_url: str, business: Business) -> None:
    engine = create_engine(schema_url, pool_size=1, max_overflow=0, pool_timeout=2)
    work_off(MemorySource(messages("a", "bad", "c")), engine, with_bad(rolls_the_session_back), max_attempts=4)
    engine.dispose()
    assert business.applied() == once("ac")
    assert business.letters() == {"bad": "failed"}
