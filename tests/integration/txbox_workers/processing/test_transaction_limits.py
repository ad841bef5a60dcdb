"""The bound on a handler's transaction: a worker that is suspended in its handler keeps its locks for so long only."""

import math
import threading
import time

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.orm import Session

from support.txbox.events import Kept
from support.workers.business import ADD, Business, apply, once
from support.workers.memory_worker import at_work, make, messages, work_off
from txbox import Message, TransactionTimedOut
from txbox.instrumentation import Settled
from txbox_workers.memory_source import MemorySource
from txbox_workers.options import TRANSACTION_SECONDS, TRANSACTION_VISIBILITIES
from txbox_workers.processing import transaction_limits

NAMES = ["transaction_timeout", "idle_in_transaction_session_timeout", "statement_timeout"]
SHOW = text("SELECT name, setting::int FROM pg_settings WHERE name = ANY(:names)")


def limits(connection: Connection | Session) -> dict[str, int]:
    """What the server's time-outs are, in milliseconds."""
    return dict(map(tuple, connection.execute(SHOW, {"names": NAMES}).fetchall()))


@pytest.mark.parametrize("limit", ["transaction_timeout", "idle_in_transaction_session_timeout"])
def test_a_worker_that_stands_still_in_its_handler_gives_up_its_locks(
    engine: Engine, business: Business, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    with engine.connect() as connection:
        if limit not in limits(connection):
            pytest.skip(f"this server has no {limit}")
    monkeypatch.setattr(transaction_limits, "LIMITS", [limit])
    in_handler, goes_on = threading.Event(), threading.Event()
    kept = Kept()

    def pay(session: Session, message: Message) -> None:
        apply(session, message)
        session.execute(ADD, {"account": 1, "amount": 1})

    def stand_still(session: Session, message: Message) -> None:
        pay(session, message)
        if not in_handler.is_set():
            in_handler.set()
            assert goes_on.wait(60)
            session.execute(text("SELECT 1"))

    stopped = MemorySource(messages("a"))
    other = MemorySource()
    with (
        at_work(make(stopped, engine, stand_still, transaction_seconds=2, hooks=[kept])),
        at_work(make(other, engine, pay)),
    ):
        assert in_handler.wait(20)
        begun = time.monotonic()
        other.send(messages("b")[0])  # waits for the row of the account
        assert other.wait_until_empty(30)
        waited = time.monotonic() - begun
        assert business.applied() == once("b")
        goes_on.set()
        assert stopped.wait_until_empty(30)
    assert 1 < waited < 15
    assert business.applied() == once("ab")
    assert business.balance() == 2
    errors = [event.error for event in kept.of(Settled) if event.error is not None]
    assert [type(error) for error in errors] == [TransactionTimedOut], "it was an attempt, and is told as what it was"


@pytest.mark.usefixtures("without_reports")
def test_each_transaction_is_limited_by_default_and_nothing_is_left_behind(engine: Engine, business: Business) -> None:
    class Visible(MemorySource):
        visibility_seconds = 30.0

    seen: list[dict[str, int]] = []
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda _c, _k, statement, *_: statements.append(statement))

    def handle(session: Session, message: Message) -> None:
        seen.append(limits(session))

    work_off(MemorySource(messages("a")), engine, handle)
    work_off(Visible(messages("b")), engine, handle)
    work_off(MemorySource(messages("c")), engine, handle, transaction_seconds=7)
    work_off(MemorySource(messages("d")), engine, handle, transaction_seconds=math.inf)
    wanted = [TRANSACTION_SECONDS, TRANSACTION_VISIBILITIES * 30.0, 7, 0]
    assert [set(one.values()) for one in seen] == [{round(seconds * 1000)} for seconds in wanted]
    source = MemorySource()
    with at_work(make(source, engine, handle)):
        statements.clear()
        source.send(messages("e")[0])
        assert source.wait_until_empty(30)
    assert len(statements) == 1, "the handler's own; limit and record go out with BEGIN"
    with engine.connect() as connection:
        assert set(limits(connection).values()) == {0}


def test_a_stricter_limit_of_the_hosts_stays(schema_url: str, business: Business) -> None:
    options = make_url(schema_url).query["options"]
    url = make_url(schema_url).update_query_dict({"options": f"{options} -c idle_in_transaction_session_timeout=3s"})
    strict = create_engine(url)
    seen: list[dict[str, int]] = []
    work_off(MemorySource(messages("a")), strict, lambda session, _: seen.append(limits(session)))
    strict.dispose()
    assert seen[0]["idle_in_transaction_session_timeout"] == 3_000
    assert seen[0]["statement_timeout"] == TRANSACTION_SECONDS * 1000


def test_a_server_that_does_not_know_a_limit_is_not_troubled(
    engine: Engine, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_limits, "LIMITS", ["no_such_timeout_of_a_server"])
    work_off(MemorySource(messages("a")), engine)
    assert business.applied() == once("a")
