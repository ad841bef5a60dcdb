"""The function on Lambda against a real Postgres, a local SQS and a local DynamoDB."""

import asyncio
import os
import random
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.orm import Session

from support import worker_process
from support.business import Business, apply, once
from support.envelopes import EVENTBRIDGE_EVENT, EVENTBRIDGE_ID, SNS_ID, SNS_NOTIFICATION
from support.lambda_events import (
    FIFO_EVENT,
    STANDARD_EVENT,
    STANDARD_URL,
    Context,
    EventSourceMapping,
    again,
    failing,
    item_id,
    of,
    record,
)
from support.lambda_events import event as event_of
from support.lambda_process import Sandbox
from support.leases import dynamodb_store
from support.queues import held, send
from support.waiting import wait_until
from txbox import DeadLetters, Inbox, InFlight, Message, Outcome, TxboxError
from txbox.instrumentation import Received, Settled
from txbox.ledgers import LeaseState, Ledger, PostgresLedger
from txbox.ledgers.lease import elapsed
from txbox_workers.aws_lambda import sqs_handler
from txbox_workers.aws_lambda.events import queue_url
from txbox_workers.aws_lambda.statements import LIMIT_TRANSACTION, LIMITS
from txbox_workers.embedded import LocalAws
from txbox_workers.sqs import redrive_to_queue

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

NOTHING = {"batchItemFailures": []}


@pytest.fixture
def business(engine: Engine) -> Business:
    return worker_process.prepare(engine)


@pytest.fixture
def pool(schema_url: str) -> Iterator[Engine]:
    """An engine as a function has it: one connection."""
    engine = create_engine(schema_url, pool_size=1, max_overflow=0, pool_timeout=5)
    yield engine
    engine.dispose()


def failing_for(*ids: str, error: type[BaseException] = ValueError) -> Callable[[Session, Message], None]:
    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id in ids:
            raise error(f"no {message.id}")

    return handle


# --- outcomes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_only_what_has_failed_comes_again(pool: Engine, business: Business, transactions: Any) -> None:
    handle = sqs_handler(Inbox("billing"), pool, failing_for("c"), transactions=transactions)
    asked = of(["a", "b", "c", "d"])
    assert handle(asked, Context(30)) == failing(["c"])
    assert business.applied() == once("abd")
    assert business.recorded() == {"a", "b", "d"}
    assert business.failing() == {"c": 1}
    assert handle(again(asked, failing(["c"])), Context(30)) == failing(["c"])
    assert business.failing() == {"c": 2}


def test_everything_went_well(pool: Engine, business: Business) -> None:
    handle = sqs_handler(Inbox("billing"), pool, apply)
    assert handle(of("abc"), Context(30)) == NOTHING
    assert handle(of("abcd"), Context(30)) == NOTHING
    assert business.applied() == once("abcd")


def test_the_documented_events(pool: Engine, business: Business) -> None:
    handle = sqs_handler(Inbox("billing"), pool, apply)
    for documented in (STANDARD_EVENT, FIFO_EVENT, STANDARD_EVENT, FIFO_EVENT):
        assert handle(documented, Context(30)) == NOTHING
    assert business.applied() == once([r["messageId"] for r in STANDARD_EVENT["Records"]] + ["1 1"])  # type: ignore[misc]


def test_what_came_through_sns_and_eventbridge_is_known_by_their_ids(pool: Engine, business: Business) -> None:
    handle = sqs_handler(Inbox("billing"), pool, apply)
    wrapped = [
        record(f"of SQS {number}", body) | {"messageAttributes": {}}
        for number, body in enumerate([SNS_NOTIFICATION, EVENTBRIDGE_EVENT, SNS_NOTIFICATION, EVENTBRIDGE_EVENT])
    ]
    assert handle(event_of(*wrapped), Context(30)) == NOTHING
    assert business.applied() == once([SNS_ID, EVENTBRIDGE_ID])


def test_copies_within_one_event(pool: Engine, business: Business) -> None:
    handle = sqs_handler(Inbox("billing"), pool, failing_for("bad"))
    one = record("a")
    bad, copy = record("bad"), record("bad") | {"messageId": item_id("copy of bad")}
    asked = event_of(one, one, record("a"), bad, copy)
    assert handle(asked, Context(30)) == failing(["bad", "copy of bad"])
    assert business.applied() == once("a")
    assert business.failing() == {"bad": 1}, "the copy has not used up another attempt"


def test_records_with_one_handle_by_hand_are_told_apart(pool: Engine, business: Business) -> None:
    asked = event_of(*(record(name) | {"receiptHandle": "r"} for name in ("a", "bad", "c")))
    assert sqs_handler(Inbox("billing"), pool, failing_for("bad"))(asked, Context(30)) == failing(["bad"])
    assert business.applied() == once("ac")


def test_a_batch_handler(pool: Engine, business: Business) -> None:
    def handle_all(session: Session, messages: Sequence[Message]) -> None:
        for message in messages:
            failing_for("b")(session, message)

    handle = sqs_handler(Inbox("billing"), pool, batch_handler=handle_all)
    assert handle(of("abc"), Context(30)) == failing("b")
    assert business.applied() == once("ac")


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_whatever_a_handler_raises_fails_its_message_only(
    pool: Engine, business: Business, error: type[BaseException]
) -> None:
    handle = sqs_handler(Inbox("billing"), pool, failing_for("b", error=error))
    assert handle(of("abc"), Context(30)) == failing("b")
    assert business.applied() == once("ac")


def test_an_interrupt_from_the_keyboard_is_not_kept_from_anybody(pool: Engine, business: Business) -> None:
    handle = sqs_handler(Inbox("billing"), pool, failing_for("b", error=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        handle(of("abc"), None)
    assert business.applied() == Counter()


def test_a_message_that_cannot_be_read_fails_and_is_parked(pool: Engine, business: Business) -> None:
    handle = sqs_handler(Inbox("billing"), pool, apply, envelope="json", max_attempts=2)
    asked = event_of(record("a", {"fine": True}), record("b", "{"))
    assert handle(asked, Context(30)) == failing("b")
    assert handle(again(asked, failing("b")), Context(30)) == NOTHING
    assert list(business.letters().values()) == ["malformed"]
    assert business.applied() == once("a")


def test_a_dead_letter_goes_back_to_its_queue(
    pool: Engine, business: Business, sqs: "SQSClient", make_queue: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue()
    mapping = EventSourceMapping(sqs, queue)
    send(sqs, queue, ["a"], tenant="t-1")
    handle = sqs_handler(Inbox("billing"), pool, failing_for("a"), max_attempts=1)
    assert mapping.poll(lambda event: handle(event, Context(30)))
    assert sum(held(sqs, queue).values()) == 0
    (letter,) = DeadLetters(pool).list()
    assert letter.source == queue_url(mapping.arn)
    DeadLetters(pool).redrive(letter.dead_letter_id or 0, lambda it: redrive_to_queue(it, client=sqs))
    well = sqs_handler(Inbox("billing"), pool, apply)
    assert mapping.poll(lambda event: well(event, Context(30)))
    assert business.applied() == once("a")


def test_hooks_hear_what_becomes_of_each_delivery(pool: Engine, business: Business) -> None:
    heard: list[Any] = []
    handle = sqs_handler(Inbox("billing"), pool, failing_for("b"), hooks=[heard.append])
    handle(of("ab"), Context(30))
    (received,) = [it for it in heard if isinstance(it, Received)]
    assert received.message_ids == ("a", "b")
    assert received.source == STANDARD_URL
    settled = {it.message_id: (it.outcome, it.acked) for it in heard if isinstance(it, Settled)}
    assert settled == {"a": (Outcome.PROCESSED, True), "b": (Outcome.FAILED, False)}


def test_a_function_of_two_queues_parks_each_message_with_its_own(pool: Engine, business: Business) -> None:
    handle = sqs_handler(Inbox("billing"), pool, failing_for("a", "b"), max_attempts=1)
    other = "arn:aws:sqs:eu-central-1:123456789012:other"
    assert handle(event_of(record("a"), record("b", arn=other)), Context(30)) == NOTHING
    sources = {letter.message_id: letter.source for letter in DeadLetters(pool).list()}
    assert sources == {"a": STANDARD_URL, "b": "https://sqs.eu-central-1.amazonaws.com/123456789012/other"}


# --- FIFO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_fifo_stops_at_the_first_failure(pool: Engine, business: Business, transactions: Any) -> None:
    handle = sqs_handler(Inbox("billing"), pool, failing_for("c"), transactions=transactions)
    groups = {"a": "g-1", "b": "g-2", "c": "g-1", "d": "g-2", "e": "g-3"}
    asked = event_of(*(record(name, group=group) for name, group in groups.items()))
    answer = handle(asked, Context(30))
    assert answer == failing("cde"), "those of other groups too: Lambda asks for it"
    assert business.order() == ["a", "b"]
    assert business.failing() == {"c": 1}
    well = sqs_handler(Inbox("billing"), pool, apply)
    assert well(again(asked, answer), Context(30)) == NOTHING
    assert business.order() == list("abcde")


def test_fifo_goes_on_after_a_dead_letter(pool: Engine, business: Business) -> None:
    handle = sqs_handler(Inbox("billing"), pool, failing_for("b"), max_attempts=1)
    assert handle(of("abc", group="g"), Context(30)) == NOTHING
    assert business.order() == ["a", "c"]
    assert business.letters() == {"b": "failed"}


def test_fifo_with_a_ledger_stops_at_the_first_failure(pool: Engine, business: Business) -> None:
    seen = []

    def mail(message: Message) -> None:
        seen.append(message.id)
        if message.id == "b":
            raise ValueError("no")

    handle = sqs_handler(PostgresLedger(pool, "billing"), None, mail)
    assert handle(of("abcd", group="g"), Context(30)) == failing("bcd")
    assert seen == ["a", "b"]


# --- connections -----------------------------------------------------------------------------------------------------


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
    handle = sqs_handler(Inbox("billing"), pool, backend(seen))
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
    handle = sqs_handler(Inbox("billing"), pool, backend(seen))
    handle(of("a"), context)
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": seen[0]})
    assert handle(of(ids, receives=receives), context) == NOTHING
    assert business.applied() == once(f"a{ids}")
    assert business.failing() == {}
    assert len(set(seen)) == 2


def test_many_connections_that_have_died_meanwhile_go_unnoticed(engine: Engine, business: Business) -> None:
    """A function in several threads; here, a host that has used the pool before."""
    handle = sqs_handler(Inbox("billing"), engine, apply)
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
    handle = sqs_handler(PostgresLedger(ledger_pool, "billing"), None, lambda message: None)
    handle(of("a"), Context(30))
    with ledger_pool.connect() as connection:
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
    assert handle(of("b"), Context(30)) == NOTHING
    ledger_pool.dispose()


def test_without_a_database_the_function_fails_as_a_whole() -> None:
    nowhere = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing", connect_args={"connect_timeout": 2})
    handle = sqs_handler(Inbox("billing"), nowhere, apply)
    with pytest.raises(TxboxError, match="billing: the database or the ledger cannot be used; all 3 messages"):
        handle(of("abc"), Context(30))


def test_without_the_tables_the_function_says_so(fresh_database: str) -> None:
    empty = create_engine(fresh_database)
    handle = sqs_handler(Inbox("billing"), empty, apply)
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
    handle = sqs_handler(Inbox("billing"), pool, lose_it, transactions=transactions, hooks=[heard.append])
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
    well = sqs_handler(Inbox("billing"), pool, apply)
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
    handle = sqs_handler(Inbox("billing"), pool, failing_for("bad"), transactions="message")
    assert handle(of(["bad", "b"]), Context(30)) == failing(["bad", "b"])
    assert len(cuts) == 1
    assert business.failing() == {"bad": 1}
    assert business.recorded() == set()


def test_an_unforeseen_error_does_not_undo_outcomes(
    pool: Engine, business: Business, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle = sqs_handler(Inbox("billing"), pool, apply, transactions="message")
    recorded = Inbox.record

    def breaks(self: Inbox, *arguments: Any) -> bool:
        if arguments[1] in "c":
            raise MemoryError("unforeseen")
        return recorded(self, *arguments)

    monkeypatch.setattr(Inbox, "record", breaks)
    monkeypatch.setattr("txbox_workers.outages.is_retryable", lambda error: isinstance(error, MemoryError))
    monkeypatch.setattr("txbox_workers.inbox_processor.InboxProcessor._failed", breaks)
    assert handle(of("abcd"), Context(30)) == failing("cd")
    assert "2 deliveries come again, because of an unforeseen error" in caplog.text


# --- time ------------------------------------------------------------------------------------------------------------


class Slow:
    """A handler that takes so many seconds, for a clock that only it moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now = elapsed()
        self.seconds = seconds
        self.runs: list[str] = []
        monkeypatch.setattr("txbox_workers.aws_lambda.deadline.elapsed", lambda: self.now)
        monkeypatch.setattr("txbox_workers.aws_lambda.limited_transactions.elapsed", lambda: self.now)

    def __call__(self, session: Session, message: Message) -> None:
        self.runs.append(message.id)
        apply(session, message)
        self.now += self.seconds

    def mail(self, message: Message) -> None:
        self.runs.append(message.id)
        self.now += self.seconds


@pytest.mark.parametrize("transactions", ["batch", "message"])
@pytest.mark.parametrize("fifo", [False, True], ids=["standard", "fifo"])
def test_out_of_time_what_was_handled_is_committed_and_the_rest_comes_again_unattempted(
    pool: Engine,
    business: Business,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    transactions: Any,
    fifo: bool,
) -> None:
    slow = Slow(monkeypatch, 3.0)
    handle = sqs_handler(Inbox("billing"), pool, slow, transactions=transactions)
    asked, answers = of("abcdefgh", group="g" if fifo else None), []
    while asked["Records"]:
        answer = handle(asked, Context(12))
        answers.append(answer)
        asked = again(asked, answer)
    assert answers == [failing("defgh"), failing("gh"), NOTHING]
    assert slow.runs == list("abcdefgh"), "nothing is run in vain"
    assert business.order() == list("abcdefgh")
    assert business.recorded() == set("abcdefgh")
    assert business.failing() == {}, "what was not begun is no attempt"
    assert caplog.text.count("billing ran out of time") == 2
    assert "billing ran out of time: 5 of 8 deliveries come again" in caplog.text


@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_handlers_that_take_nearly_all_the_time_still_get_on(
    pool: Engine, business: Business, monkeypatch: pytest.MonkeyPatch, transactions: Any
) -> None:
    slow = Slow(monkeypatch, 10.5)
    handle = sqs_handler(Inbox("billing"), pool, slow, transactions=transactions)
    asked = of("abcdef")
    for left in ("bcdef", "cdef", "def", "ef", "f", ""):
        answer = handle(asked, Context(12))
        assert answer == failing(left), "one in each invocation, at least"
        asked = again(asked, answer)
    assert business.applied() == once("abcdef")
    assert business.failing() == {}


def test_a_handler_that_is_slow_and_fails_is_counted_in_the_end(
    pool: Engine, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First it takes the batch with it; as a suspect it is alone, and its attempts count."""
    slow = Slow(monkeypatch, 8.0)

    def fails(session: Session, message: Message) -> None:
        slow(session, message)
        if message.id == "a":
            raise ValueError("no")

    handle = sqs_handler(Inbox("billing"), pool, fails, max_attempts=3)
    asked = of("abc", group="g")
    invocations = 0
    while asked["Records"] and invocations < 20:
        asked = again(asked, handle(asked, Context(12)))
        invocations += 1
    assert asked == {"Records": []}
    assert business.letters() == {"a": "failed"}
    assert business.order() == ["b", "c"]


def test_a_failure_is_not_called_a_want_of_time(
    pool: Engine, business: Business, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow(monkeypatch, 8.0)

    def fails(session: Session, message: Message) -> None:
        slow(session, message)
        raise ValueError("no")

    handle = sqs_handler(Inbox("billing"), pool, fails)
    assert handle(of("a"), Context(12)) == failing("a")
    assert "ran out of time" not in caplog.text


def test_an_invocation_with_no_time_begins_nothing(pool: Engine, business: Business) -> None:
    handle = sqs_handler(Inbox("billing"), pool, apply)
    assert handle(of("abc"), Context(0)) == failing("abc")
    assert business.recorded() == set()


def test_a_ledger_begins_nothing_that_does_not_fit(
    pool: Engine, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch, 5.0)
    handle = sqs_handler(PostgresLedger(pool, "billing"), None, slow.mail)
    asked = of("abcd")
    answer = handle(asked, Context(12))
    assert answer == failing("cd")
    assert business.rows("SELECT count(*) FROM message_lease") == [2]
    assert handle(again(asked, answer), Context(12)) == NOTHING
    assert slow.runs == list("abcd")


@pytest.mark.parametrize("beside_an_inbox", [False, True])
def test_a_lease_does_not_outlive_the_invocation(
    pool: Engine, engine: Engine, business: Business, beside_an_inbox: bool
) -> None:
    left = []

    def look(*arguments: Any) -> None:
        left.extend(
            business.rows(
                "SELECT extract(epoch FROM expires_at - clock_timestamp())::float FROM message_lease "
                "WHERE expires_at > now()"
            )
        )

    ledger = PostgresLedger(engine, "billing")
    if beside_an_inbox:
        handle = sqs_handler(Inbox("billing"), pool, look, ledger=ledger, lease_seconds=600)
    else:
        handle = sqs_handler(ledger, None, look, lease_seconds=600)
    context = Context(7)
    assert handle(of("a"), context) == NOTHING
    assert handle(of("b"), None) == NOTHING
    with_deadline, without = left[0], max(left)
    assert 5 < with_deadline <= 7
    assert without > 500


# --- transactions end with the invocation ----------------------------------------------------------------------------


def settings(session: Session) -> dict[str, str]:
    names = ("transaction_timeout", "idle_in_transaction_session_timeout")
    return {name: session.execute(text(f"SELECT current_setting('{name}', true)")).scalar_one() for name in names}


def test_a_transaction_tells_the_server_when_the_invocation_ends(pool: Engine, business: Business) -> None:
    seen = []
    handle = sqs_handler(Inbox("billing"), pool, lambda session, _: seen.append(settings(session)))
    handle(of("a"), Context(20))
    handle(of("b"), None)
    with pool.connect() as connection:
        after = settings(Session(connection))
    limits = [int(value.removesuffix("ms")) for value in seen[0].values() if value is not None]
    assert limits
    assert all(15_000 < limit <= 20_000 for limit in limits), seen
    assert set(seen[1].values()) <= {"0", None}, "without a deadline there is no limit"
    assert set(after.values()) <= {"0", None}, "and none is left behind in the connection"


def test_a_stricter_limit_of_the_hosts_stays(schema_url: str, business: Business) -> None:
    options = make_url(schema_url).query["options"]
    url = make_url(schema_url).update_query_dict({"options": f"{options} -c idle_in_transaction_session_timeout=3s"})
    strict = create_engine(url, pool_size=1)
    seen = []
    handle = sqs_handler(Inbox("billing"), strict, lambda session, _: seen.append(settings(session)))
    handle(of("a"), Context(20))
    strict.dispose()
    assert seen[0]["idle_in_transaction_session_timeout"] == "3s"


def test_a_server_that_does_not_know_a_limit_is_not_troubled(pool: Engine) -> None:
    with pool.begin() as connection:
        rows = connection.exec_driver_sql(LIMIT_TRANSACTION, ("5", ["no_such_timeout_of_a_server"], 5)).fetchall()
    assert rows == []


def test_the_limit_costs_one_statement_for_an_event(pool: Engine, business: Business) -> None:
    statements: list[str] = []
    event.listen(pool, "before_cursor_execute", lambda _c, _k, statement, *_: statements.append(statement))
    handle = sqs_handler(Inbox("billing"), pool, lambda session, message: None)
    handle(of("abcdefghij"), Context(30))
    assert len(statements) == 2, "the limit, and the record"
    assert statements.count(LIMIT_TRANSACTION) == 1
    handle(of("klm"), None)
    assert len(statements) == 3


# --- sandboxes that die ----------------------------------------------------------------------------------------------


Start = Callable[..., Sandbox]


@pytest.fixture
def start(schema_url: str) -> Iterator[Start]:
    sandboxes: list[Sandbox] = []

    def start(**settings: Any) -> Sandbox:
        sandboxes.append(Sandbox(schema_url, **settings))
        return sandboxes[-1]

    yield start
    for sandbox in sandboxes:
        sandbox.close()


def runs(business: Business) -> Counter[str]:
    return Counter(business.rows("SELECT message_id FROM run"))


def test_an_invocation_that_is_killed_comes_again(business: Business, start: Start) -> None:
    asked = of("abcd")
    victim = start(deadly_once=["c"])
    assert victim.invoke(asked, 30) is None
    assert victim.process.wait(20) == -signal.SIGKILL
    assert business.applied() == Counter()
    assert start().invoke(again(asked, failing("abcd")), 30) == NOTHING
    assert business.applied() == once("abcd")
    assert business.balance() == 4


def test_a_lease_of_a_killed_invocation_is_over_when_the_invocation_would_be(business: Business, start: Start) -> None:
    asked = of("a")
    context_seconds = 3.0
    victim = start(ledger=True, deadly_once=["a"], lease_seconds=600)
    victim.invoke(of(["warm"]), 30)
    begun = elapsed()
    assert victim.invoke(asked, context_seconds) is None
    successor = start(ledger=True, lease_seconds=600)
    asked = again(asked, failing("a"))
    assert successor.invoke(asked, 30) == failing("a"), "in flight until then"
    wait_until(lambda: successor.invoke(asked, 30) == NOTHING, timeout=20, every=0.1)
    assert context_seconds - 1 <= elapsed() - begun <= context_seconds + 2
    assert runs(business)["a"] == 2


@pytest.mark.parametrize("limit", LIMITS)
def test_a_frozen_sandbox_gives_up_its_locks_when_its_time_is_over(
    engine: Engine, business: Business, start: Start, limit: str
) -> None:
    """Lambda does not thaw a process whose invocation has timed out: nothing closes its connection."""
    asked, seconds = of("abc"), 3.0
    with engine.connect() as connection:
        if connection.execute(text("SELECT current_setting(:name, true)"), {"name": limit}).scalar() is None:
            pytest.skip(f"this server has no {limit}")
    victim = start(frozen_once=["b"], limits=[limit])
    assert victim.invoke(of(["warm"]), 30) == NOTHING
    begun = elapsed()
    victim.send(asked, seconds)
    wait_until(lambda: runs(business)["b"], "the handler of b is stopped")

    def free() -> bool:
        with engine.connect() as connection:
            try:
                return Inbox("billing", wait_seconds=0.01).record(connection, "b")
            except InFlight:
                return False
            finally:
                connection.rollback()

    assert not free()
    wait_until(free, "the lock on b is given up", timeout=20)
    assert seconds - 1.0 <= elapsed() - begun <= seconds + 2.0
    redelivery = start()
    assert redelivery.invoke(again(asked, failing("abc")), 30) == NOTHING
    assert business.applied() == once(["a", "b", "c", "warm"])

    # Should it ever wake up, it finds that its transaction is gone.
    os.kill(victim.process.pid, signal.SIGCONT)
    assert victim.answer() is None
    assert business.applied() == once(["a", "b", "c", "warm"])


# --- an event source mapping -----------------------------------------------------------------------------------------


def campaign(
    business: Business, sqs: "SQSClient", queue: str, start: Start, *, messages: int, kills: int, seed: int, fifo: bool
) -> None:
    """Three sandboxes at a time, killed at random while they are at work, until the queue is empty."""
    chance = random.Random(seed)
    ids = [f"m{number:04}" for number in range(messages)]
    if fifo:
        for number in range(5):
            send(sqs, queue, ids[number::5], group=f"g-{number}")
    else:
        send(sqs, queue, ids)
        send(sqs, queue, chance.sample(ids, messages // 10))  # the producer re-sends some
    mapping = EventSourceMapping(sqs, queue)
    left = threading.Semaphore(kills)
    killed = []

    def invoker(number: int) -> None:
        luck = random.Random(f"{seed} {number}")
        sandbox = start(pause=0.01, max_attempts=10)

        def invoke(event: dict[str, Any]) -> dict[str, Any] | None:
            timer = threading.Timer(luck.uniform(0.005, 0.15), sandbox.process.kill)
            deadly = luck.random() < 0.5 and left.acquire(blocking=False)
            sandbox.send(event, 20)
            if deadly:
                timer.start()
            answer = sandbox.answer()
            timer.cancel()
            if answer is None:
                killed.append(number)
            return answer

        while sum(held(sqs, queue).values()):
            mapping.poll(invoke)
            if sandbox.process.poll() is not None:
                sandbox.close()
                sandbox = start(pause=0.01, max_attempts=10)

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(invoker, number) for number in range(3)]:
            done.result(150)
    assert business.letters() == {}, f"seed {seed}"
    assert business.applied() == once(ids), f"seed {seed}"
    assert business.balance() == messages
    assert len(killed) >= kills // 3, "enough kills to mean something"
    if fifo:
        order = business.order()
        for number in range(5):
            assert [it for it in order if it in set(ids[number::5])] == ids[number::5], f"seed {seed}"


@pytest.mark.parametrize("fifo", [False, True], ids=["standard", "fifo"])
@pytest.mark.chaos
def test_random_kills_of_a_function(
    business: Business, sqs: "SQSClient", make_queue: Callable[..., str], start: Start, fifo: bool
) -> None:
    queue = make_queue(fifo=fifo, VisibilityTimeout="1")
    campaign(business, sqs, queue, start, messages=80, kills=5, seed=11, fifo=fifo)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_many_random_kills_of_a_function(
    business: Business, sqs: "SQSClient", make_queue: Callable[..., str], start: Start, seed: int
) -> None:
    queue = make_queue(VisibilityTimeout="1")
    campaign(business, sqs, queue, start, messages=600, kills=30, seed=seed, fifo=False)


# --- ledgers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["postgres", "dynamodb"])
def ledger(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Ledger]:
    if request.param == "postgres":
        yield PostgresLedger(engine, "billing")
    else:
        request.getfixturevalue("aws")
        client = boto3.client("dynamodb")
        yield dynamodb_store(client).ledger("billing")
        client.close()


def test_a_ledger_alone(ledger: Ledger) -> None:
    seen = []

    def mail(message: Message, *, lease: Any) -> None:
        seen.append((message.id, lease.attempt))
        if message.id == "b" and lease.attempt == 1:
            raise ConnectionError("no answer")

    handle = sqs_handler(ledger, None, mail)
    asked = of("abc")
    answer = handle(asked, Context(30))
    assert answer == failing("b")
    assert handle(again(asked, answer), Context(30)) == NOTHING
    assert handle(asked, Context(30)) == NOTHING
    assert seen == [("a", 1), ("b", 1), ("c", 1), ("b", 2)]


def test_what_another_function_works_on_is_handed_back(ledger: Ledger) -> None:
    assert ledger.acquire("b").state is LeaseState.ACQUIRED
    seen = []
    handle = sqs_handler(ledger, None, lambda message: seen.append(message.id))
    assert handle(of("abc"), Context(30)) == failing("b")
    assert seen == ["a", "c"]


def test_a_ledger_beside_an_inbox(pool: Engine, business: Business, ledger: Ledger) -> None:
    handle = sqs_handler(Inbox("billing"), pool, failing_for("b"), ledger=ledger)
    assert handle(of("abc"), Context(30)) == failing("b")
    assert business.applied() == once("ac")
    assert handle(of("abc"), Context(30)) == failing("b")
    assert business.applied() == once("ac")


def test_with_a_ledger_alone_dead_letters_are_kept_where_the_engine_says(pool: Engine, business: Business) -> None:
    def fail(message: Message) -> None:
        raise ValueError("no")

    handle = sqs_handler(PostgresLedger(pool, "billing"), pool, fail, max_attempts=2)
    assert handle(of("a"), Context(30)) == failing("a")
    assert handle(of("a", receives=2), Context(30)) == NOTHING
    assert business.letters() == {"a": "failed"}


def test_a_ledger_that_is_away_fails_the_function_as_a_whole(aws: LocalAws) -> None:
    from txbox.ledgers.dynamodb import DynamoDBLedger

    client = boto3.client("dynamodb")
    handle = sqs_handler(DynamoDBLedger("billing", table="no_such_table", client=client), None, lambda message: None)
    with pytest.raises(TxboxError, match=r"all 2 messages of the event come again.*no_such_table"):
        handle(of("ab"), Context(30))
    client.close()


# --- several at once -------------------------------------------------------------------------------------------------


def test_invocations_in_several_threads_have_each_their_own_time(engine: Engine, business: Business) -> None:
    """One without any time begins and ends while a handler of another one runs, which has enough of it."""
    running, go_on = threading.Event(), threading.Event()

    def slow(session: Session, message: Message) -> None:
        running.set()
        assert go_on.wait(20)
        apply(session, message)

    handle = sqs_handler(Inbox("billing"), engine, slow)
    with ThreadPoolExecutor(1) as threads:
        timely = threads.submit(handle, of("ab"), Context(60))
        assert running.wait(20)
        assert handle(of("cd"), Context(0)) == failing("cd")
        go_on.set()
        assert timely.result(20) == NOTHING
    assert business.applied() == once("ab")


def test_no_error_shows_what_a_message_holds(pool: Engine, engine: Engine, business: Business) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE dead_letter ADD CHECK (false)")
    secret = "4111-1111-1111-1111"
    handle = sqs_handler(Inbox("billing"), pool, failing_for("a"), max_attempts=1)
    with pytest.raises(TxboxError) as caught:
        handle(event_of(record("a") | {"body": secret}), Context(30))
    shown = "".join(traceback.format_exception(caught.value))
    assert "dead_letter" in shown
    assert secret not in shown
