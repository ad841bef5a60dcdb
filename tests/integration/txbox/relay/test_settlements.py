"""Settlements of async publishers' messages: tried again as long as their claims stand, and each counts once."""

import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, create_engine, make_url

from integration.txbox.conftest import StartRelay
from support.postgres.statements import run
from support.postgres.tcp_proxy import TcpProxy
from support.txbox.outbox import OWN, letters, numbered, publish
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from txbox import DeadLetters, Outbox, Outgoing
from txbox.instrumentation import DatabaseLost, Event

AWAITED = pytest.mark.parametrize("start_relay", ["async"], indirect=True)


@pytest.fixture
def proxy(schema_url: str) -> Iterator[TcpProxy]:
    url = make_url(schema_url)
    with TcpProxy(url.host or "127.0.0.1", url.port or 5432) as proxy:
        yield proxy


@pytest.fixture
def proxied(schema_url: str, proxy: TcpProxy) -> Iterator[Engine]:
    """Connections that can be lost, for settlements alone."""
    engine = create_engine(make_url(schema_url).set(host="127.0.0.1", port=proxy.port), pool_size=1, max_overflow=0)
    yield engine
    engine.dispose()


@AWAITED
def test_a_refusal_whose_settlement_is_tried_again_counts_once(
    engine: Engine, start_relay: StartRelay, proxy: TcpProxy, proxied: Engine
) -> None:
    broker = RecordingPublisher(lambda _: "no")
    relay = start_relay(broker, max_attempts=3)
    assert relay._async_sender is not None
    relay._async_sender._settler._engine = proxied
    proxy.lose_next(reaches_server=True)
    publish(engine, *numbered(1, key="a"))
    wait_until(lambda: letters(engine), "it is parked")
    assert proxy.lost == 1
    assert [message.attempts for message in broker.refused] == [0, 1, 2]
    assert letters(engine) == [(f"txbox:outbox:{OWN}", "no", 3)]


@AWAITED
def test_a_letter_that_was_redriven_is_not_parked_again_by_a_settlement_that_is_tried_again(
    engine: Engine, start_relay: StartRelay, proxy: TcpProxy, proxied: Engine
) -> None:
    """It is redriven in the time until the settlement, whose answer was lost, is tried again."""

    def redrive(event: Event) -> None:
        if isinstance(event, DatabaseLost) and not redriven:
            redriven.append(DeadLetters(engine).republish(1, Outbox()))

    redriven: list[object] = []
    broker = RecordingPublisher(lambda _: None if redriven else "no")
    relay = start_relay(broker, max_attempts=1, hooks=[redrive])
    assert relay._async_sender is not None
    relay._async_sender._settler._engine = proxied
    proxy.lose_next(reaches_server=True)
    publish(engine, Outgoing(OWN, "one", key="a"))
    broker.wait_for(1)
    with engine.connect() as connection:
        parked = connection.exec_driver_sql("SELECT count(*), count(redriven_at) FROM dead_letter").one()
    assert tuple(parked) == (1, 1)


@AWAITED
@pytest.mark.parametrize("fails", ["all", "this one"])
def test_a_stop_tries_to_settle_what_was_sent_until_its_time_is_over(
    engine: Engine,
    start_relay: StartRelay,
    proxy: TcpProxy,
    proxied: Engine,
    left: Callable[[], list[str]],
    fails: str,
) -> None:
    """Nothing can be settled, or one settlement is refused; two seconds after the stop has begun, all is well."""
    heard: list[Event] = []
    relay = start_relay(RecordingPublisher(), hooks=[heard.append])
    assert relay._async_sender is not None
    if fails == "all":
        proxy.refuse()
        proxy.cut()
        relay._async_sender._settler._engine = proxied
    else:
        run(
            engine,
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;"
            "CREATE TRIGGER refuse BEFORE DELETE ON outbox_message FOR EACH ROW EXECUTE FUNCTION refuse()",
        )
    publish(engine, *numbered(1))
    wait_until(lambda: sum(isinstance(event, DatabaseLost) for event in heard) >= 3, "its pause is long")
    mended = threading.Timer(2, proxy.accept if fails == "all" else lambda: run(engine, "DROP FUNCTION refuse CASCADE"))
    mended.start()
    assert relay.stop(10)
    mended.join()
    assert left() == []
