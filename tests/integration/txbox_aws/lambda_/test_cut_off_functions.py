"""Functions on Lambda that lose the database in a handler, and end well: that was no attempt."""

import threading
import time
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.orm import Session

from support.aws.lambda_events import NOTHING, Context, of
from support.postgres.tcp_proxy import TcpProxy
from support.waiting import wait_until
from support.workers.business import Business, apply, once
from txbox import Inbox, Message, TxboxError
from txbox_aws.lambda_ import handler as function_module
from txbox_aws.lambda_ import sqs_handler


@pytest.fixture
def sandbox(schema_url: str, proxy: TcpProxy) -> Iterator[Engine]:
    url = make_url(schema_url).set(host="127.0.0.1", port=proxy.port)
    engine = create_engine(url, pool_size=1, max_overflow=0, pool_timeout=5)
    yield engine
    engine.dispose()


def test_an_attempt_is_taken_back_before_the_answer(
    proxy: TcpProxy, sandbox: Engine, pool: Engine, business: Business
) -> None:
    """Four sandboxes lose the database for a moment, one after the other, and are not invoked again."""

    def back_again(refused: int) -> None:
        wait_until(lambda: proxy.refused > refused)
        proxy.accept()

    def lose_it(session: Session, message: Message) -> None:
        apply(session, message)
        proxy.refuse()
        proxy.cut()
        healers.append(threading.Thread(target=back_again, args=(proxy.refused,)))
        healers[-1].start()
        session.execute(text("SELECT 1"))

    healers: list[threading.Thread] = []
    for count in range(2, 6):
        handle = sqs_handler(inbox=Inbox("billing"), engine=sandbox, handler=lose_it, max_attempts=2)
        with pytest.raises(TxboxError, match="cannot be used"):
            handle(of("a", receives=count), Context(30))
        assert business.failing() == {}
        healers[-1].join(20)
    well = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=apply, max_attempts=2)
    assert well(of("a", receives=6), Context(30)) == NOTHING
    assert business.applied() == once("a")
    assert business.letters() == {}


@pytest.mark.parametrize(("seconds", "owed_seconds"), [(30.0, 0.3), (2.0, 60.0)], ids=["10 s", "its own time"])
def test_what_could_not_be_taken_back_in_time_is_taken_back_by_the_next_invocation(
    proxy: TcpProxy,
    sandbox: Engine,
    business: Business,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seconds: float,
    owed_seconds: float,
) -> None:
    monkeypatch.setattr(function_module, "UNSAVED_SECONDS", owed_seconds)
    runs: list[str] = []

    def lose_it(session: Session, message: Message) -> None:
        apply(session, message)
        runs.append(message.id)
        if len(runs) == 1:
            proxy.refuse()
            proxy.cut()
            session.execute(text("SELECT 1"))

    handle = sqs_handler(inbox=Inbox("billing"), engine=sandbox, handler=lose_it, max_attempts=1)
    began = time.monotonic()
    with pytest.raises(TxboxError, match="cannot be used"):
        handle(of("a"), Context(seconds))
    assert time.monotonic() - began < 10
    assert "how an attempt has ended could not be saved" in caplog.text
    assert business.failing() == {"a": 1}
    proxy.accept()
    assert handle(of("a", receives=2), Context(30)) == NOTHING
    assert business.applied() == once("a")
    assert (business.letters(), business.failing()) == ({}, {})
