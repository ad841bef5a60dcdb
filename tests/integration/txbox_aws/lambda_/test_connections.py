"""Connections of a function on Lambda: warm, stale, and lost in the middle of an event."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session

from support.aws.lambda_events import NOTHING, Context, failing, failing_for, of
from support.workers.business import Business, apply, once
from txbox import Inbox, Message, Outcome, TxboxError
from txbox.instrumentation import Settled
from txbox.leases import PostgresLedger
from txbox_aws.lambda_ import sqs_handler


def backend(seen: list[int]) -> Callable[[Session, Message], None]:
    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        seen.append(session.execute(text("SELECT pg_backend_pid()")).scalar_one())

    return handle


def test_nothing_is_connected_before_the_first_event_and_warm_invocations_share_a_connection(
    pool: Engine, business: Business
) -> None:
    connected: list[object] = []
    event.listen(pool, "connect", lambda connection, _: connected.append(connection))
    seen: list[int] = []
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=backend(seen))
    assert connected == []
    for message_id in "abc":
        assert handle(of(message_id), Context(30)) == NOTHING
    assert len(connected) == 1
    assert len(seen) == 3
    assert len(set(seen)) == 1


@pytest.mark.parametrize("seconds", [30, None], ids=["with a deadline", "without"])
@pytest.mark.parametrize(
    ("ids", "receives"), [("bc", 1), ("b", 1), ("bc", 5)], ids=["by a batch", "by one alone", "by a suspect"]
)
def test_a_connection_that_has_died_meanwhile_goes_unnoticed(
    pool: Engine, engine: Engine, business: Business, seconds: float | None, ids: str, receives: int
) -> None:
    seen: list[int] = []
    context = None if seconds is None else Context(seconds)
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=backend(seen))
    handle(of("a"), context)
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": seen[0]})
    assert handle(of(ids, receives=receives), context) == NOTHING
    assert business.applied() == once(f"a{ids}")
    assert business.failing() == {}
    assert len(set(seen)) == 2


def test_many_connections_that_have_died_meanwhile_go_unnoticed(engine: Engine, business: Business) -> None:
    """A function in several threads; here, a host that has used the pool before."""
    handle = sqs_handler(inbox=Inbox("billing"), engine=engine, handler=apply)
    connections = [engine.connect() for _ in range(5)]
    pids = [connection.execute(text("SELECT pg_backend_pid()")).scalar_one() for connection in connections]
    for connection in connections:
        connection.close()
    admin = create_engine(engine.url)
    with admin.begin() as connection:
        connection.execute(text("SELECT pg_terminate_backend(pid, 5000) FROM unnest(:pids) AS pid"), {"pids": pids})
    admin.dispose()
    assert handle(of("abc"), Context(30)) == NOTHING
    assert business.applied() == once("abc")


def test_a_ledgers_connection_that_has_died_meanwhile_goes_unnoticed(
    pool: Engine, engine: Engine, business: Business
) -> None:
    ledger_pool = create_engine(engine.url, pool_size=1)
    handle = sqs_handler(ledger=PostgresLedger("billing", engine=ledger_pool), handler=lambda message: None)
    handle(of("a"), Context(30))
    with ledger_pool.connect() as connection:
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
    assert handle(of("b"), Context(30)) == NOTHING
    ledger_pool.dispose()


def test_without_a_database_the_function_fails_as_a_whole() -> None:
    nowhere = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing", connect_args={"connect_timeout": 2})
    handle = sqs_handler(inbox=Inbox("billing"), engine=nowhere, handler=apply)
    with pytest.raises(TxboxError, match="billing: the database or the ledger cannot be used; all 3 messages"):
        handle(of("abc"), Context(30))


def test_without_the_tables_the_function_says_so(fresh_database: str) -> None:
    empty = create_engine(fresh_database)
    handle = sqs_handler(inbox=Inbox("billing"), engine=empty, handler=apply)
    with pytest.raises(TxboxError, match="processed_message"):
        handle(of("abc"), Context(30))
    empty.dispose()


@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_when_the_database_goes_in_the_middle_the_outcomes_before_it_stand(
    pool: Engine, engine: Engine, business: Business, transactions: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def lose_it(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id == "c":
            session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    heard: list[Any] = []
    handle = sqs_handler(
        inbox=Inbox("billing"), engine=pool, handler=lose_it, transactions=transactions, hooks=[heard.append]
    )
    asked = of("abcd")
    if transactions == "message":
        assert handle(asked, Context(30)) == failing("cd")
        assert business.applied() == once("ab")
        assert "2 deliveries come again" in caplog.text
    else:
        with pytest.raises(TxboxError, match="all 4 messages"):
            handle(asked, Context(30))
        assert business.applied() == Counter()
    handed_back = {it.message_id for it in heard if isinstance(it, Settled) and it.outcome is Outcome.IN_FLIGHT}
    assert handed_back == ({"c", "d"} if transactions == "message" else set("abcd"))
    assert business.failing() == {}, "no message's fault"
    well = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=apply)
    assert well(asked, Context(30)) == NOTHING
    assert business.applied() == once("abcd")


def test_an_event_is_begun_again_only_if_nothing_has_happened(pool: Engine, engine: Engine, business: Business) -> None:
    """Here the connection dies after the first message has failed: to begin again would cost it another attempt."""
    cuts = []

    def cut(connection: Any, _record: object) -> None:
        if not cuts and business.failing():
            cuts.append(connection.info.backend_pid)
            with engine.begin() as admin:
                admin.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": cuts[0]})

    event.listen(pool, "checkin", cut)
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("bad"), transactions="message")
    assert handle(of(["bad", "b"]), Context(30)) == failing(["bad", "b"])
    assert len(cuts) == 1
    assert business.failing() == {"bad": 1}
    assert business.recorded() == set()


def test_an_unforeseen_error_does_not_undo_outcomes(
    pool: Engine, business: Business, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=apply, transactions="message")
    recorded = Inbox.recorded

    def breaks(self: Inbox, *arguments: Any, **options: Any) -> Any:
        if list(arguments[1].ids) == ["c"]:
            raise MemoryError("unforeseen")
        return recorded(self, *arguments, **options)

    def fails(*_: Any) -> None:
        raise MemoryError("unforeseen")

    monkeypatch.setattr(Inbox, "recorded", breaks)
    monkeypatch.setattr(
        "txbox_workers.processing.outage_errors.is_retryable", lambda error: isinstance(error, MemoryError)
    )
    monkeypatch.setattr("txbox_workers.processing.inbox_processor.InboxProcessor._failed", fails)
    assert handle(of("abcd"), Context(30)) == failing("cd")
    assert "2 deliveries come again, because of an unforeseen error" in caplog.text


def test_an_engine_that_commits_every_statement_is_refused(pool: Engine, business: Business) -> None:
    by_itself = pool.execution_options(isolation_level="AUTOCOMMIT")
    handle = sqs_handler(inbox=Inbox("billing"), engine=by_itself, handler=apply)
    with pytest.raises(TxboxError, match="NotInTransaction"):
        handle(of("ab"), Context(30))
    assert business.applied() == {}
    assert business.recorded() == set()
