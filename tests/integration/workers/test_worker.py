"""The worker on a real Postgres, fed from memory: what becomes of the messages of a batch."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from support.business import ADD, Business, apply, once
from support.events import Kept
from support.waiting import wait_until
from txbox import (
    DeadLetters,
    Failures,
    Inbox,
    InvalidConfiguration,
    Message,
    NotInTransaction,
    Outcome,
    SchemaMissing,
    TransactionEnded,
)
from txbox.instrumentation import (
    Committed,
    DatabaseLost,
    DatabaseRestored,
    Event,
    Received,
    Retried,
    Settled,
    Stopped,
)
from txbox_workers import processor as processor_module
from txbox_workers import worker as worker_module
from txbox_workers.backoff import Backoff
from txbox_workers.delivery import Delivery
from txbox_workers.memory import MemorySource
from txbox_workers.outages import DatabaseUnavailable
from txbox_workers.worker import Worker

AT_ONCE = Backoff(first_seconds=0.01, longest_seconds=0.02)


@pytest.fixture
def business(engine: Engine) -> Business:
    return Business(engine)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "OUTAGE_BACKOFF", Backoff(first_seconds=0.02, longest_seconds=0.1))
    monkeypatch.setattr(processor_module, "IN_FLIGHT_BACKOFF", AT_ONCE)


def messages(*ids: str) -> list[Message]:
    return [Message(id_, f"body of {id_}".encode(), {"colour": "red"}) for id_ in ids]


def numbered(count: int, prefix: str = "m") -> list[Message]:
    return messages(*(f"{prefix}{number:04}" for number in range(count)))


def make(source: MemorySource, engine: Engine, handler: Any = apply, **options: Any) -> Worker:
    options.setdefault("inbox", Inbox("billing", wait_seconds=0.2))
    if "batch_handler" not in options:
        options["handler"] = handler
    return Worker(source, engine=engine, backoff=AT_ONCE, **options)


@contextmanager
def at_work(*workers: Worker) -> Iterator[None]:
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        stopped = [worker.stop(20) for worker in workers]
        assert all(stopped)


def work_off(source: MemorySource, engine: Engine, handler: Any = apply, **options: Any) -> Worker:
    """Work until everything is acked."""
    worker = make(source, engine, handler, **options)
    with at_work(worker):
        assert source.wait_until_empty(30), "something was never acked"
    return worker


@contextmanager
def counted(engine: Engine) -> Iterator[list[str]]:
    """Every statement and every commit of an engine."""
    log: list[str] = []

    def on_statement(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        log.append(statement.strip())

    def on_commit(_conn: Any) -> None:
        log.append("COMMIT")

    event.listen(engine, "before_cursor_execute", on_statement)
    event.listen(engine, "commit", on_commit)
    try:
        yield log
    finally:
        event.remove(engine, "before_cursor_execute", on_statement)
        event.remove(engine, "commit", on_commit)


# --- a batch ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_one_insert_and_one_commit(engine: Engine, business: Business) -> None:
    source = MemorySource(numbered(10), batch_size=10)
    with counted(engine) as log:
        work_off(source, engine)
    inserts = [statement for statement in log if "processed_message" in statement and "INSERT" in statement]
    assert len(inserts) == 1
    assert log.count("COMMIT") == 1
    assert len([statement for statement in log if "INSERT INTO effect" in statement]) == 10
    assert not [statement for statement in log if "SAVEPOINT" in statement]
    assert business.order() == [message.id for message in numbered(10)]
    assert business.recorded() == {message.id for message in numbered(10)}


def test_one_transaction_per_message_on_request(engine: Engine, business: Business) -> None:
    source = MemorySource(numbered(5))
    with counted(engine) as log:
        work_off(source, engine, transactions="message")
    assert log.count("COMMIT") == 5
    assert business.applied() == once(message.id for message in numbered(5))


def test_duplicates_within_a_batch_and_across_batches(engine: Engine, business: Business) -> None:
    source = MemorySource(messages("a", "b", "a", "c", "a", "b"), batch_size=6)
    worker = work_off(source, engine)
    assert business.applied() == once("abc")
    assert worker.counts == {Outcome.PROCESSED: 3, Outcome.DUPLICATE: 3}
    again = MemorySource(messages("c", "d", "a"))
    worker = work_off(again, engine)
    assert business.applied() == once("abcd")
    assert worker.counts == {Outcome.PROCESSED: 1, Outcome.DUPLICATE: 2}


def test_each_subscriber_processes_a_message_once(engine: Engine, business: Business) -> None:
    for subscriber in ("billing", "shipping", "billing"):
        work_off(MemorySource(messages("a", "b")), engine, inbox=Inbox(subscriber))
    assert business.applied() == {"a": 2, "b": 2}


def test_a_batch_handler_is_given_the_first_timers_of_a_batch_at_once(engine: Engine, business: Business) -> None:
    work_off(MemorySource(messages("b")), engine)
    calls: list[list[str]] = []

    def handle(session: Session, batch: Sequence[Message]) -> None:
        calls.append([message.id for message in batch])
        for message in batch:
            apply(session, message)

    work_off(MemorySource(messages("a", "b", "c", "a")), engine, batch_handler=handle)
    assert calls == [["a", "c"]]
    assert business.applied() == once("abc")


def test_a_batch_handler_that_fails_meets_its_messages_one_by_one(engine: Engine, business: Business) -> None:
    calls: list[list[str]] = []

    def handle(session: Session, batch: Sequence[Message]) -> None:
        calls.append([message.id for message in batch])
        for message in batch:
            apply(session, message)
            if message.id == "bad":
                raise ValueError("no")

    work_off(MemorySource(messages("a", "bad", "c")), engine, batch_handler=handle, max_attempts=2)
    assert calls[:4] == [["a", "bad", "c"], ["a"], ["bad"], ["c"]]
    assert business.applied() == once("ac")
    assert business.letters() == {"bad": "failed"}


def test_the_good_ones_commit_and_only_the_bad_one_is_handed_back(engine: Engine, business: Business) -> None:
    attempts = []
    kept = Kept()

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id == "bad":
            attempts.append(business.failing().get("bad", 0))
            if len(attempts) < 4:
                raise ValueError("not yet")

    work_off(MemorySource(messages("a", "bad", "c")), engine, handle, hooks=[kept])
    assert business.applied() == once(["a", "bad", "c"])
    assert kept.outcomes("bad") == [Outcome.FAILED, Outcome.FAILED, Outcome.PROCESSED]
    assert kept.outcomes("a") == kept.outcomes("c") == [Outcome.PROCESSED]
    # The second run of the first delivery is no attempt of its own; from the third delivery on, attempts are counted
    # before they are made.
    assert attempts == [0, 0, 1, 3]
    assert business.failing() == {}
    assert business.letters() == {}


def test_after_its_last_attempt_a_message_is_parked_whole_and_acked(engine: Engine, business: Business) -> None:
    runs = []

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id == "bad":
            runs.append(message)
            raise ValueError("nul \0 and \N{SNOWMAN}") from KeyError("the cause")

    work_off(MemorySource(messages("a", "bad", "c"), name="queue-7"), engine, handle, max_attempts=3)
    assert business.applied() == once("ac")
    assert business.recorded() == {"a", "c"}
    assert business.failing() == {}
    # Three deliveries, of which the first ran twice: in the batch, and alone.
    assert len(runs) == 4
    (letter,) = DeadLetters(engine).list()
    assert (letter.message_id, letter.body, letter.headers) == ("bad", b"body of bad", {"colour": "red"})
    assert (letter.reason, letter.attempts, letter.source) == ("failed", 3, "queue-7")
    assert letter.error.startswith("ValueError: nul ")
    assert "KeyError: 'the cause'" in letter.error


# --- handlers that misbehave -----------------------------------------------------------------------------------------


def commits_the_session(session: Session) -> None:
    session.commit()


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


def closes_the_session(session: Session) -> None:
    session.close()


TOLERATED = [
    commits_the_session,
    commits_and_goes_on,
    works_in_a_savepoint,
    undoes_a_savepoint,
    leaves_a_savepoint_open,
    leaves_a_savepoint_of_the_connection_open,
    swallows_an_error_within_a_savepoint,
    closes_the_session,
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


def commits_behind_a_comment(session: Session) -> None:
    session.execute(text("/* settle */ COMMIT"))


def commits_behind_another_statement(session: Session) -> None:
    session.connection().exec_driver_sql("SELECT 1; COMMIT; BEGIN")


def rolls_back_by_sql(session: Session) -> None:
    session.execute(text("ROLLBACK"))


def rolls_back_behind_everything(session: Session) -> None:
    session.connection().connection.dbapi_connection.rollback()


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
    rolls_back_by_sql,
    swallows_the_error_of_a_statement,
    swallows_the_error_of_a_flush,
    commits_behind_a_comment,
    commits_behind_another_statement,
    leaves_the_process,
    is_cancelled,
    raises_what_cannot_be_printed,
]

APPLY_BAD = text("INSERT INTO effect (message_id, body) VALUES ('bad', 'again')")


def with_bad(behaviour: Callable[[Session], None]) -> Callable[[Session, Message], None]:
    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id == "bad":
            behaviour(session)

    return handle


@pytest.mark.parametrize("mode", ["batch", "message", "batch_handler"])
@pytest.mark.parametrize("behaviour", TOLERATED)
def test_a_handler_that_does_as_it_would_with_its_own_session_is_understood(
    engine: Engine, business: Business, behaviour: Callable[[Session], None], mode: str
) -> None:
    work_off(MemorySource(messages("a", "bad", "c")), engine, max_attempts=2, **handlers(with_bad(behaviour), mode))
    assert business.applied() == once(["a", "bad", "c"])
    assert business.letters() == {}
    if "ADD" in behaviour.__code__.co_names:
        assert business.balance() == 1


@pytest.mark.parametrize("mode", ["batch", "message", "batch_handler"])
@pytest.mark.parametrize("behaviour", REFUSED)
def test_a_handler_that_undoes_or_ends_the_transaction_fails_alone(
    engine: Engine, business: Business, behaviour: Callable[[Session], None], mode: str
) -> None:
    source = MemorySource(messages("a", "bad", "c"))
    worker = work_off(source, engine, max_attempts=2, **handlers(with_bad(behaviour), mode))
    assert business.applied() == once("ac")
    assert business.balance() == 0
    assert business.recorded() == {"a", "c"}, "what is recorded was applied, and nothing else"
    assert business.letters() == {"bad": "failed"}
    assert worker.counts == {Outcome.PROCESSED: 2, Outcome.FAILED: 1, Outcome.DEAD: 1}


def handlers(handle: Callable[[Session, Message], None], mode: str) -> dict[str, Any]:
    def handle_batch(session: Session, batch: Sequence[Message]) -> None:
        for message in batch:
            handle(session, message)

    if mode == "batch_handler":
        return {"batch_handler": handle_batch}
    return {"handler": handle, "transactions": mode}


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


def test_a_rollback_behind_sqlalchemy_is_noticed(engine: Engine, business: Business) -> None:
    work_off(MemorySource(messages("a", "bad", "c")), engine, with_bad(rolls_back_behind_everything), max_attempts=2)
    assert business.applied() == once("ac")
    assert business.recorded() == {"a", "c"}
    assert business.letters() == {"bad": "failed"}


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


@pytest.mark.parametrize("how", ["close", "invalidate", "terminate"])
def test_a_handler_that_loses_its_connection_is_parked_and_nobody_with_it(
    engine: Engine, business: Business, how: str
) -> None:
    runs = []

    def lose(session: Session) -> None:
        runs.append(1)
        connection = session.connection()
        if how == "terminate":
            session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
        else:
            getattr(connection, how)()

    work_off(MemorySource(messages("a", "bad", "c")), engine, with_bad(lose), max_attempts=3)
    assert business.applied() == once("ac")
    assert business.letters() == {"bad": "crashed"}
    assert len(runs) <= 3


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


# --- the database says no --------------------------------------------------------------------------------------------


def test_a_constraint_that_fails_at_commit_fails_its_message_only(engine: Engine, business: Business) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE shipment (account_id int CONSTRAINT shipment_account REFERENCES account "
            "DEFERRABLE INITIALLY DEFERRED)"
        )

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        session.execute(text("INSERT INTO shipment VALUES (:id)"), {"id": 99 if message.id == "bad" else 1})

    work_off(MemorySource(messages("a", "bad", "c")), engine, handle, max_attempts=2)
    assert business.applied() == once("ac")
    assert business.recorded() == {"a", "c"}
    (letter,) = DeadLetters(engine).list()
    assert "shipment_account" in letter.error


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_serialization_failure_is_retried_and_never_read_as_a_duplicate(
    schema_url: str, business: Business, level: str
) -> None:
    engine = create_engine(schema_url, isolation_level=level, pool_size=10)
    both_have_read = threading.Barrier(2)
    kept = Kept()
    met: set[str] = set()

    def handle(session: Session, message: Message) -> None:
        balance = session.execute(text("SELECT balance FROM account WHERE account_id = 1")).scalar_one()
        if message.id not in met:
            met.add(message.id)
            both_have_read.wait(10)
        session.execute(text("UPDATE account SET balance = :new WHERE account_id = 1"), {"new": balance + 1})
        apply(session, message)

    sources = [MemorySource(messages("a")), MemorySource(messages("b"))]
    with at_work(*(make(source, engine, handle, hooks=[kept], max_attempts=1) for source in sources)):
        assert all(source.wait_until_empty(20) for source in sources)
    engine.dispose()
    assert business.balance() == 2
    assert business.applied() == once("ab")
    assert {event.sqlstate for event in kept.of(Retried)} == {"40001"}
    assert kept.outcomes("a") == kept.outcomes("b") == [Outcome.PROCESSED]


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_two_workers_over_the_same_messages_and_rows_come_to_exact_totals(
    schema_url: str, business: Business, level: str
) -> None:
    engine = create_engine(schema_url, isolation_level=level, pool_size=10)

    def handle(session: Session, message: Message) -> None:
        account = session.execute(text("SELECT balance FROM account WHERE account_id = 1 FOR UPDATE"))
        session.execute(
            text("UPDATE account SET balance = :new WHERE account_id = 1"), {"new": account.scalar_one() + 1}
        )
        apply(session, message)

    same = numbered(60)
    sources = [MemorySource(same, batch_size=4), MemorySource(same[::-1], batch_size=3)]
    workers = [make(source, engine, handle, threads=2) for source in sources]
    with at_work(*workers):
        assert all(source.wait_until_empty(40) for source in sources)
    engine.dispose()
    assert business.balance() == 60
    assert business.applied() == once(message.id for message in same)
    assert business.letters() == {}


def test_a_deadlock_between_two_handlers_is_retried(engine: Engine, business: Business) -> None:
    both_hold_one = threading.Barrier(2)
    kept = Kept()
    met: set[str] = set()

    def handle(session: Session, message: Message) -> None:
        accounts = (1, 2) if message.id == "a" else (2, 1)
        session.execute(ADD, {"account": accounts[0], "amount": 1})
        if message.id not in met:
            met.add(message.id)
            both_hold_one.wait(10)
        session.execute(ADD, {"account": accounts[1], "amount": 1})
        apply(session, message)

    sources = [MemorySource(messages("a")), MemorySource(messages("b"))]
    with at_work(*(make(source, engine, handle, hooks=[kept], max_attempts=1) for source in sources)):
        assert all(source.wait_until_empty(20) for source in sources)
    assert (business.balance(1), business.balance(2)) == (2, 2)
    assert business.applied() == once("ab")
    assert [event.sqlstate for event in kept.of(Retried)] == ["40P01"]


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_message_in_flight_elsewhere_does_not_pin_the_worker(engine: Engine, business: Business, ending: str) -> None:
    kept = Kept()
    source = MemorySource(messages("a", "held", "c"))
    with engine.connect() as elsewhere:
        Inbox("billing").record(elsewhere, "held")
        with at_work(make(source, engine, hooks=[kept], max_attempts=2)):
            # More deliveries than attempts are allowed: being in flight is no failure.
            wait_until(lambda: len(kept.outcomes("held")) >= 4, "handed back four times")
            assert set(kept.outcomes("held")) == {Outcome.IN_FLIGHT}
            assert business.applied() == once("ac"), "the neighbours were not kept waiting"
            getattr(elsewhere, ending)()
            assert source.wait_until_empty(20)
    assert business.applied() == once("ac" if ending == "commit" else ["a", "held", "c"])
    assert kept.outcomes("held")[-1] is (Outcome.DUPLICATE if ending == "commit" else Outcome.PROCESSED)
    assert business.letters() == {}
    assert business.failing() == {}


# --- fingerprints ----------------------------------------------------------------------------------------------------


def test_the_same_id_with_another_body_is_parked_and_never_run(engine: Engine, business: Business) -> None:
    inbox = Inbox("billing", fingerprint=True)
    kept = Kept()
    source = MemorySource(
        [*messages("a"), Message("a", b"forged"), *messages("a", "b"), Message("b", b"other")], batch_size=10
    )
    work_off(source, engine, inbox=inbox, hooks=[kept])
    again = MemorySource([*messages("b", "c"), Message("a", b"forged later"), *messages("d")])
    work_off(again, engine, inbox=inbox, hooks=[kept])
    assert business.order("body") == [f"body of {id_}" for id_ in "abcd"]
    letters = {letter.body: letter for letter in DeadLetters(engine).list()}
    assert set(letters) == {b"forged", b"other", b"forged later"}
    assert {letter.reason for letter in letters.values()} == {"mismatch"}
    assert kept.outcomes("a").count(Outcome.MISMATCH) == 2
    assert kept.outcomes("a").count(Outcome.DUPLICATE) == 1


# --- trouble of our own, and of the database -------------------------------------------------------------------------


class Trouble:
    """Makes recording impossible for a while, without the connection being lost."""

    def __init__(self, engine: Engine, schema_url: str) -> None:
        self._admin = engine
        self._role = f"worker_{make_url(schema_url).query['options'].removeprefix('-csearch_path=')}"  # type: ignore[union-attr]
        self.read_only = False
        schema = self._role.removeprefix("worker_")
        with engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE ROLE {self._role}")
            connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO {self._role}")
            connection.exec_driver_sql(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {self._role}")
            connection.exec_driver_sql(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO {self._role}")
        url = make_url(schema_url).update_query_dict({"options": f"-csearch_path={schema} -crole={self._role}"})
        self.engine = create_engine(url, poolclass=NullPool)
        event.listen(self.engine, "connect", self._on_connect)

    def _on_connect(self, dbapi_connection: Any, _record: Any) -> None:
        if self.read_only:
            dbapi_connection.execute("SET default_transaction_read_only = on")
            dbapi_connection.commit()

    def begin(self, kind: str) -> None:
        self._change(kind, begins=True)

    def end(self, kind: str) -> None:
        self._change(kind, begins=False)

    def _change(self, kind: str, *, begins: bool) -> None:
        verb, preposition = ("REVOKE", "FROM") if begins else ("GRANT", "TO")
        names = ("processed_message", "elsewhere") if begins else ("elsewhere", "processed_message")
        sql = {
            "renamed": f"ALTER TABLE {names[0]} RENAME TO {names[1]}",
            "insert revoked": f"{verb} INSERT ON processed_message {preposition} {self._role}",
            "everything revoked": f"{verb} ALL ON processed_message {preposition} {self._role}",
            "schema revoked": f"{verb} USAGE ON SCHEMA {self._role.removeprefix('worker_')} {preposition} {self._role}",
        }
        if kind == "read only":
            self.read_only = begins
            return
        with self._admin.begin() as connection:
            connection.exec_driver_sql(sql[kind])

    def close(self) -> None:
        self.engine.dispose()
        with self._admin.begin() as connection:
            connection.exec_driver_sql(f"DROP OWNED BY {self._role}")
            connection.exec_driver_sql(f"DROP ROLE {self._role}")


@pytest.fixture
def trouble(engine: Engine, business: Business, schema_url: str) -> Iterator[Trouble]:
    trouble = Trouble(engine, schema_url)
    yield trouble
    trouble.close()


@pytest.mark.parametrize("kind", ["renamed", "insert revoked", "everything revoked", "schema revoked", "read only"])
def test_trouble_with_recording_is_no_message_s_fault(trouble: Trouble, business: Business, kind: str) -> None:
    kept = Kept()
    source = MemorySource(messages("a", "b"))
    with at_work(make(source, trouble.engine, hooks=[kept], max_attempts=2)):
        assert source.wait_until_empty(20)
        trouble.begin(kind)
        try:
            for message in messages("c", "d", "e"):
                source.send(message)
            wait_until(lambda: len(kept.of(DatabaseLost)) >= 6, "tried again and again")
            deliveries = len(kept.of(Received))
            assert not kept.of(DatabaseRestored)
        finally:
            trouble.end(kind)
        assert deliveries <= 3, "nothing more was taken while nothing could be recorded"
        assert source.wait_until_empty(20)
    assert kept.of(DatabaseRestored)
    assert business.applied() == once("abcde")
    assert business.letters() == {}
    assert business.failing() == {}


def test_trouble_with_recording_does_not_count_against_a_suspect(trouble: Trouble, business: Business) -> None:
    """A message is suspect after a few deliveries, and these may all have fallen into the trouble."""
    worker = make(MemorySource(), trouble.engine, max_attempts=3)
    trouble.begin("insert revoked")
    for receive_count in range(1, 12):
        with pytest.raises(DatabaseUnavailable):
            process(worker, delivery("a", receive_count=receive_count))
    trouble.end("insert revoked")
    assert business.failing() == {}
    assert [outcome for _, outcome in process(worker, delivery("a", receive_count=12))] == [Outcome.PROCESSED]


def test_trouble_with_our_own_notes_parks_nothing_and_loses_nothing(
    trouble: Trouble, engine: Engine, business: Business
) -> None:
    def fail_b(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id == "b":
            raise ValueError("no")

    kept = Kept()
    source = MemorySource(messages("a", "b", "c"))

    def fail_b_in_trouble(session: Session, message: Message) -> None:
        if not kept.of(DatabaseLost):
            with engine.begin() as connection:
                connection.exec_driver_sql("ALTER TABLE IF EXISTS message_failure RENAME TO elsewhere")
        fail_b(session, message)

    with at_work(make(source, trouble.engine, fail_b_in_trouble, hooks=[kept], max_attempts=5)):
        wait_until(lambda: len(kept.of(DatabaseLost)) >= 3)
        with engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE elsewhere RENAME TO message_failure")
        assert source.wait_until_empty(20)
    assert business.applied() == once("ac")
    assert set(business.letters()) == {"b"}


def test_start_refuses_a_database_that_cannot_be_used(engine: Engine, business: Business) -> None:
    with pytest.raises(NotInTransaction):
        make(MemorySource(), engine.execution_options(isolation_level="AUTOCOMMIT")).start()
    for table in ("processed_message", "message_failure", "dead_letter"):
        with engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {table} RENAME TO elsewhere")
        with pytest.raises(SchemaMissing, match=table):
            make(MemorySource(), engine).start()
        with engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE elsewhere RENAME TO {table}")


# --- order within a group, and suspects: the processor alone ---------------------------------------------------------


def delivery(message_id: str, *, receive_count: int = 1, group: str | None = None, receipt: str = "") -> Delivery:
    (message,) = messages(message_id)
    return Delivery(
        message, receipt=receipt or f"{message_id}-{receive_count}", receive_count=receive_count, group=group
    )


def process(worker: Worker, *deliveries: Delivery) -> list[tuple[str, Outcome]]:
    return [
        (settlement.delivery.receipt, settlement.outcome)
        for settlements in worker._processor.process(deliveries, lambda: False)
        for settlement in settlements
    ]


def failing_first(*ids: str) -> Callable[[Session, Message], None]:
    """A handler that fails these until they have failed twice: in the batch, and alone."""
    left = dict.fromkeys(ids, 2)

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if left.get(message.id):
            left[message.id] -= 1
            raise ValueError("not yet")

    return handle


def test_what_follows_a_failure_in_its_group_is_handed_back(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, failing_first("a2"))
    outcomes = process(
        worker,
        delivery("a1", group="a"),
        delivery("b1", group="b"),
        delivery("a2", group="a"),
        delivery("a3", group="a"),
        delivery("b2", group="b"),
    )
    assert dict(outcomes) == {
        "a1-1": Outcome.PROCESSED,
        "b1-1": Outcome.PROCESSED,
        "a2-1": Outcome.FAILED,
        "a3-1": Outcome.IN_FLIGHT,
        "b2-1": Outcome.PROCESSED,
    }
    assert business.order() == ["a1", "b1", "b2"]


def test_repeats_of_a_group_s_messages_do_not_overtake_either(engine: Engine, business: Business) -> None:
    """The producer has sent each message twice, in another order the second time."""
    worker = make(MemorySource(), engine, failing_first("m1"))
    process(
        worker,
        *(delivery(id_, group="g") for id_ in ("m1", "m2", "m3")),
        *(delivery(id_, group="g", receipt=f"again-{id_}") for id_ in ("m3", "m2", "m1")),
    )
    assert business.order() == []
    process(worker, *(delivery(id_, group="g", receive_count=2) for id_ in ("m1", "m2", "m3")))
    assert business.order() == ["m1", "m2", "m3"]


def test_an_id_that_comes_in_two_groups_breaks_the_order_of_neither(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, failing_first("x"))
    process(
        worker,
        delivery("x", group="a", receipt="a-x"),
        delivery("x", group="b", receipt="b-x"),
        delivery("y", group="b", receipt="b-y"),
    )
    assert business.order() == []


def test_copies_in_one_batch_of_a_message_that_fails_are_one_attempt(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, failing_always, max_attempts=3)
    for count in (1, 2):
        outcomes = process(worker, *(delivery("x", receive_count=count, receipt=f"{count}-{n}") for n in range(10)))
        assert sorted(outcome for _, outcome in outcomes) == [Outcome.FAILED, *[Outcome.IN_FLIGHT] * 9]
    outcomes = process(worker, *(delivery("x", receive_count=3, receipt=f"3-{n}") for n in range(10)))
    assert {outcome for _, outcome in outcomes} == {Outcome.DEAD}
    assert business.failing() == {}
    (letter,) = DeadLetters(engine).list()
    assert letter.attempts == 3


def test_a_copy_that_fails_beside_a_letter_joins_it(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, failing_always, max_attempts=1)
    assert process(worker, delivery("x")) == [("x-1", Outcome.DEAD)]
    assert process(worker, delivery("x", receipt="copy")) == [("copy", Outcome.DEAD)]
    assert business.failing() == {}
    assert len(DeadLetters(engine).list()) == 1


def test_a_message_in_flight_blocks_its_group(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine)
    with engine.connect() as elsewhere:
        Inbox("billing").record(elsewhere, "m1")
        process(worker, *(delivery(id_, group="g") for id_ in ("m1", "m2")))
        elsewhere.rollback()
    assert business.order() == []


def test_a_dead_letter_lets_its_group_go_on(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, failing_first("m1"), max_attempts=1)
    process(worker, *(delivery(id_, group="g") for id_ in ("m1", "m2", "m3")))
    assert business.letters() == {"m1": "failed"}
    assert business.order() == ["m2", "m3"]


def test_a_suspect_that_was_processed_meanwhile_is_a_duplicate(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine)
    process(worker, delivery("a"))
    assert process(worker, delivery("a", receive_count=50)) == [("a-50", Outcome.DUPLICATE)]
    assert business.applied() == once("a")
    assert business.failing() == {}


def test_a_suspect_that_is_processed_elsewhere_while_it_waits_leaves_nothing_behind(
    engine: Engine, business: Business
) -> None:
    worker = make(MemorySource(), engine, inbox=Inbox("billing", wait_seconds=20))
    with engine.connect() as elsewhere:
        Inbox("billing").record(elsewhere, "a")
        outcomes: list[tuple[str, Outcome]] = []
        waiter = threading.Thread(target=lambda: outcomes.extend(process(worker, delivery("a", receive_count=5))))
        waiter.start()
        wait_until(business.failing, "counted in advance")
        elsewhere.commit()
    waiter.join(20)
    assert outcomes == [("a-5", Outcome.DUPLICATE)]
    assert business.failing() == {}


def test_deliveries_alone_condemn_nobody(engine: Engine, business: Business) -> None:
    """Hundreds of deliveries, in outages or beside a deadly message, and not one attempt."""
    worker = make(MemorySource(), engine, max_attempts=3)
    assert process(worker, delivery("a", receive_count=500)) == [("a-500", Outcome.PROCESSED)]
    assert business.applied() == once("a")


@pytest.mark.parametrize("max_attempts", [1, 2, 3, 4, 10])
def test_hand_backs_do_not_cost_a_message_its_attempts(engine: Engine, business: Business, max_attempts: int) -> None:
    """Delivered fifty times in an outage, or behind the first message of its group; then its handler fails."""
    worker = make(MemorySource(), engine, failing_always, max_attempts=max_attempts)
    outcomes = [
        outcome
        for count in range(50, 50 + max_attempts)
        for _, outcome in process(worker, delivery("a", receive_count=count))
    ]
    assert outcomes == [*[Outcome.FAILED] * (max_attempts - 1), Outcome.DEAD]
    (letter,) = DeadLetters(engine).list()
    assert (letter.reason, letter.attempts) == ("failed", max_attempts)
    assert letter.error == "ValueError: always"


def failing_always(session: Session, message: Message) -> None:
    apply(session, message)
    raise ValueError("always")


def test_a_letter_that_could_not_be_parked_at_once_keeps_its_reason(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, failing_always, max_attempts=2)
    process(worker, delivery("a"))
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE dead_letter RENAME TO elsewhere")
    with pytest.raises(DatabaseUnavailable):
        process(worker, delivery("a", receive_count=2))
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE elsewhere RENAME TO dead_letter")
    assert process(worker, delivery("a", receive_count=3)) == [("a-3", Outcome.DEAD)]
    (letter,) = DeadLetters(engine).list()
    assert (letter.reason, letter.attempts, letter.error) == ("failed", 2, "ValueError: always")


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_letter_whose_ack_was_lost_is_not_attempted_again(
    engine: Engine, business: Business, max_attempts: int
) -> None:
    runs: list[str] = []

    def handle(session: Session, message: Message) -> None:
        runs.append(message.id)
        failing_always(session, message)

    worker = make(MemorySource(), engine, handle, max_attempts=max_attempts)
    for count in range(1, max_attempts + 1):
        process(worker, delivery("a", receive_count=count))
    assert business.letters() == {"a": "failed"}
    for count in range(max_attempts + 1, max_attempts + 4):
        assert process(worker, delivery("a", receive_count=count)) == [(f"a-{count}", Outcome.DEAD)]
    assert len(runs) == max_attempts
    assert len(DeadLetters(engine).list()) == 1


def test_an_attempt_that_was_taken_back_does_not_look_like_a_crash(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, failing_first("a"), max_attempts=3)
    assert process(worker, delivery("a", receive_count=2)) == [("a-2", Outcome.FAILED)]
    with engine.connect() as elsewhere:
        Inbox("billing").record(elsewhere, "a")
        assert process(worker, delivery("a", receive_count=3)) == [("a-3", Outcome.IN_FLIGHT)]
        elsewhere.rollback()
    assert process(worker, delivery("a", receive_count=4)) == [("a-4", Outcome.FAILED)]
    assert process(worker, delivery("a", receive_count=5)) == [("a-5", Outcome.PROCESSED)]


# --- the worker itself -----------------------------------------------------------------------------------------------


def test_a_hook_that_raises_stops_nothing(engine: Engine, business: Business) -> None:
    def hook(event: Event) -> None:
        raise RuntimeError("the hook is broken")

    source = MemorySource(numbered(25))
    worker = work_off(source, engine, hooks=[hook])
    assert business.applied() == once(message.id for message in numbered(25))
    assert worker.counts == {Outcome.PROCESSED: 25}


@pytest.mark.parametrize("moment", [Received, Committed, Settled])
@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError])
def test_a_hook_that_wants_to_leave_does_not_end_the_polling_thread(
    engine: Engine, business: Business, error: type[BaseException], moment: type[Event]
) -> None:
    left = [1]

    def hook(event: Event) -> None:
        if isinstance(event, moment) and left:
            left.pop()
            raise error

    source = MemorySource(messages("a"))
    with at_work(make(source, engine, hooks=[hook])):
        wait_until(lambda: not left)
        source.send(messages("b")[0])
        wait_until(lambda: "b" in business.applied())
    assert set(business.applied().values()) == {1}


def test_several_threads_count_exactly(engine: Engine, business: Business) -> None:
    source = MemorySource([*numbered(200), *numbered(50)], batch_size=7)
    worker = work_off(source, engine, threads=4)
    assert worker.counts == {Outcome.PROCESSED: 200, Outcome.DUPLICATE: 50}
    assert business.applied() == once(message.id for message in numbered(200))


def test_one_connection_is_enough_for_one_thread(schema_url: str, business: Business) -> None:
    engine = create_engine(schema_url, pool_size=1, max_overflow=0, pool_timeout=2)
    work_off(MemorySource(messages("a", "bad", "c")), engine, with_bad(rolls_the_session_back), max_attempts=4)
    engine.dispose()
    assert business.applied() == once("ac")
    assert business.letters() == {"bad": "failed"}


def test_a_pool_that_is_too_small_is_no_message_s_fault(schema_url: str, business: Business) -> None:
    engine = create_engine(schema_url, pool_size=1, max_overflow=0, pool_timeout=0.05)
    source = MemorySource(batch_size=2)
    kept = Kept()
    with at_work(make(source, engine, hooks=[kept], max_attempts=1)):
        with engine.connect():
            for message in numbered(20):
                source.send(message)
            wait_until(lambda: kept.of(DatabaseLost))
        assert source.wait_until_empty(30)
    engine.dispose()
    assert business.applied() == once(message.id for message in numbered(20))
    assert business.letters() == {}


class Hanging:
    """A handler that waits until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()

    def __call__(self, session: Session, message: Message) -> None:
        apply(session, message)
        self.begun.set()
        assert self.go.wait(30)


def test_stop_finishes_the_transaction_under_way_and_hands_back_the_rest(engine: Engine, business: Business) -> None:
    handle, kept = Hanging(), Kept()
    source = MemorySource(messages("a", "b", "c"))
    worker = make(source, engine, handle, transactions="message", hooks=[kept])
    worker.start()
    assert handle.begun.wait(10)
    stopper = threading.Thread(target=worker.stop)
    stopper.start()
    wait_until(worker._stopping.is_set)
    handle.go.set()
    stopper.join(20)
    assert business.applied() == once("a")
    assert (kept.outcomes("b"), kept.outcomes("c")) == ([Outcome.IN_FLIGHT], [Outcome.IN_FLIGHT])
    assert kept.of(Stopped)[-1].drained
    work_off(source, engine)
    assert business.applied() == once("abc")


def test_stop_says_so_when_a_handler_hangs_and_the_worker_can_start_again_later(
    engine: Engine, business: Business
) -> None:
    handle, kept = Hanging(), Kept()
    source = MemorySource(messages("a", "b"))
    worker = make(source, engine, handle, transactions="message", hooks=[kept])
    worker.start()
    assert handle.begun.wait(10)
    assert worker.stop(0.1) is False
    assert worker.running
    assert not kept.of(Stopped)[-1].drained
    with pytest.raises(InvalidConfiguration, match="running already"):
        worker.start()
    handle.go.set()
    assert worker.stop(20) is True
    assert not worker.running
    worker.start()
    assert source.wait_until_empty(20)
    assert worker.stop(20) is True
    assert business.applied() == once("ab")


def test_a_handler_may_stop_its_own_worker(engine: Engine, business: Business) -> None:
    answers = []

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        answers.append(worker.stop(0.1))

    source = MemorySource(messages("a", "b"))
    worker = make(source, engine, handle, transactions="message")
    worker.start()
    wait_until(lambda: not worker.running)
    assert answers == [False]
    assert worker.stop(5) is True
    assert business.applied() == once("a")


def test_run_works_outside_the_main_thread_until_stop(engine: Engine, business: Business) -> None:
    source = MemorySource(messages("a"))
    worker = make(source, engine)
    answers: list[bool] = []
    runner = threading.Thread(target=lambda: answers.append(worker.run()))
    runner.start()
    assert source.wait_until_empty(20)
    worker.stop()
    runner.join(20)
    assert not runner.is_alive()
    assert answers == [True]
    # What stopped the first run does not stop the second.
    source.send(messages("b")[0])
    runner = threading.Thread(target=worker.run)
    runner.start()
    assert source.wait_until_empty(20)
    worker.stop()
    runner.join(20)
    assert business.applied() == once("ab")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_is_not_forgotten(engine: Engine, business: Business, number: signal.Signals) -> None:
    class Slow(MemorySource):
        def open(self) -> None:
            # Where it would hurt most: while the interrupted code holds the lock of the event that says stop.
            with worker._stopping._cond:
                signal.raise_signal(number)

    before = signal.getsignal(number)
    source = Slow(messages("a"))
    worker = make(source, engine)
    assert worker.run() is True
    assert not worker.running
    assert signal.getsignal(number) is before


def test_signals_are_given_back_when_the_start_fails(engine: Engine, business: Business) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE processed_message RENAME TO elsewhere")
    with pytest.raises(SchemaMissing):
        make(MemorySource(), engine).run()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_source_that_breaks_in_every_call_does_not_end_the_worker(engine: Engine, business: Business) -> None:
    class Breaking(MemorySource):
        left: ClassVar = {"receive": 2, "ack": 2, "hand_back": 2}

        def __getattribute__(self, name: str) -> Any:
            left = object.__getattribute__(self, "left")
            if left.get(name):
                left[name] -= 1
                raise LookupError(f"{name} is broken")
            return object.__getattribute__(self, name)

        def requeue(self) -> None:
            """What a broker does when visibility ends."""
            with self._condition:
                self._ready.extend(self._taken.values())
                self._taken.clear()

    source = Breaking(messages("a", "b"))
    kept = Kept()
    with at_work(make(source, engine, hooks=[kept])):
        for _ in range(2):
            wait_until(lambda: source._taken and source._taken.keys() <= {e.delivery_id for e in kept.of(Settled)})
            source.requeue()
        assert source.wait_until_empty(20)
    assert business.applied() == once("ab")


@pytest.mark.parametrize("max_attempts", [1, 2, 3, None])
def test_a_success_leaves_no_failure_behind(engine: Engine, business: Business, max_attempts: int | None) -> None:
    worker = make(MemorySource(), engine, max_attempts=max_attempts)
    for receive_count in range(1, 5):
        process(worker, delivery(f"m{receive_count}", receive_count=receive_count))
    assert len(business.applied()) == 4
    assert business.failing() == {}


def test_failures_are_forgotten_with_the_success(engine: Engine, business: Business) -> None:
    Failures(engine, "billing").fail("a", ValueError("once"))
    worker = make(MemorySource(), engine)
    process(worker, delivery("a", receive_count=2))
    assert business.failing() == {}
