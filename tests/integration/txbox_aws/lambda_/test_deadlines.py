"""The deadline of an invocation: what is begun before it, and what is left to the next one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from support.aws.lambda_events import NOTHING, Context, again, failing, of
from support.workers.business import Business, apply, once
from txbox import Inbox, Message
from txbox.leases import PostgresLedger
from txbox.leases.lease import elapsed
from txbox_aws.lambda_ import sqs_handler


class Slow:
    """A handler that takes so many seconds, for a clock that only it moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now = elapsed()
        self.seconds = seconds
        self.runs: list[str] = []
        monkeypatch.setattr("txbox_aws.lambda_.deadline.elapsed", lambda: self.now)

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
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=slow, transactions=transactions)
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
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=slow, transactions=transactions)
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

    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=fails, max_attempts=3)
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

    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=fails)
    assert handle(of("a"), Context(12)) == failing("a")
    assert "ran out of time" not in caplog.text


def test_an_invocation_with_no_time_begins_nothing(pool: Engine, business: Business) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=apply)
    assert handle(of("abc"), Context(0)) == failing("abc")
    assert business.recorded() == set()


def test_a_ledger_begins_nothing_that_does_not_fit(
    pool: Engine, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch, 5.0)
    handle = sqs_handler(ledger=PostgresLedger("billing", engine=pool), handler=slow.mail)
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

    ledger = PostgresLedger("billing", engine=engine)
    if beside_an_inbox:
        handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=look, ledger=ledger, lease_seconds=600)
    else:
        handle = sqs_handler(ledger=ledger, handler=look, lease_seconds=600)
    context = Context(7)
    assert handle(of("a"), context) == NOTHING
    assert handle(of("b"), None) == NOTHING
    with_deadline, without = left[0], max(left)
    assert 5 < with_deadline <= 7
    assert without > 500


def test_invocations_in_several_threads_have_each_their_own_time(engine: Engine, business: Business) -> None:
    """One without any time begins and ends while a handler of another one runs, which has enough of it."""
    running, go_on = threading.Event(), threading.Event()

    def slow(session: Session, message: Message) -> None:
        running.set()
        assert go_on.wait(20)
        apply(session, message)

    handle = sqs_handler(inbox=Inbox("billing"), engine=engine, handler=slow)
    with ThreadPoolExecutor(1) as threads:
        timely = threads.submit(handle, of("ab"), Context(60))
        assert running.wait(20)
        assert handle(of("cd"), Context(0)) == failing("cd")
        go_on.set()
        assert timely.result(20) == NOTHING
    assert business.applied() == once("ab")


def settings(session: Session) -> dict[str, str]:
    names = ("transaction_timeout", "idle_in_transaction_session_timeout")
    return {name: session.execute(text(f"SELECT current_setting('{name}', true)")).scalar_one() for name in names}


def test_a_transaction_tells_the_server_when_the_invocation_ends(pool: Engine, business: Business) -> None:
    seen = []
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=lambda session, _: seen.append(settings(session)))
    handle(of("a"), Context(20))
    handle(of("b"), None)
    with pool.connect() as connection:
        after = settings(Session(connection))
    limits = [int(value.removesuffix("ms")) for value in seen[0].values() if value is not None]
    assert limits
    assert all(15_000 < limit <= 20_000 for limit in limits), seen
    assert set(seen[1].values()) <= {"0", None}, "without a deadline there is no limit"
    assert set(after.values()) <= {"0", None}, "and none is left behind in the connection"
