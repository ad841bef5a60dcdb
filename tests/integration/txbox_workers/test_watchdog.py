"""Connections on which no answer comes any more, and nothing says that they are gone."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from support.postgres.statements import statements_sent
from support.postgres.tcp_proxy import COMMIT, TcpProxy
from support.postgres.transaction_pooler import transaction_pooler
from support.txbox.outbox import OUTBOX, OWN
from support.txbox.publishers import RecordingPublisher
from support.workers.business import Business, apply
from support.workers.memory_worker import at_work, make, numbered
from txbox import InvalidConfiguration, Message
from txbox.leases import LeaseState, PostgresLedger
from txbox.leases.renewer import LeaseRenewer
from txbox.postgres import watchdog
from txbox.postgres.engines import KEEPALIVES, adopt, open_engine
from txbox.relay import Relay
from txbox.schema import tables
from txbox_workers.memory_source import MemorySource

SILENCE = 0.3
ANSWER = 1.0
LONG = 5 * SILENCE
"""Seconds; as long as that, a statement is asked about several times."""

BOUND = 15.0
"""Seconds; a loaded machine is slow."""

SHORT_LEASE = 4.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", ANSWER)
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.05)


@pytest.fixture
def quiet(schema_url: str, proxy: TcpProxy) -> Iterator[Engine]:
    """An engine whose connections pass through the proxy, and are asked about soon."""
    url = make_url(schema_url).set(host="127.0.0.1", port=proxy.port)
    engine = create_engine(
        url.update_query_dict({"txbox_watchdog_seconds": str(SILENCE), "connect_timeout": "2"}), pool_size=10
    )
    yield engine
    engine.dispose()


@pytest.mark.parametrize("moment", ["in the handler", "at the commit"])
@pytest.mark.parametrize("everything", [False, True])
def test_a_worker_is_freed_and_applies_the_message_once(
    quiet: Engine, engine: Engine, proxy: TcpProxy, moment: str, everything: bool
) -> None:
    business = Business(engine)
    calls: list[float] = []

    def handle(session: Session, message: Message) -> None:
        calls.append(time.monotonic())
        if len(calls) > 1:
            apply(session, message)
            return
        if moment == "at the commit":
            apply(session, message)
            session.flush()
        (proxy.swallow_replies if everything else proxy.hush)()
        if everything:
            threading.Timer(2 * (SILENCE + ANSWER), proxy.accept).start()
        if moment == "in the handler":
            apply(session, message)

    source = MemorySource(numbered(1))
    with at_work(make(source, quiet, handle)):
        assert source.wait_until_empty(2 * BOUND)
    assert calls[-1] - calls[0] < BOUND or len(calls) == 1
    assert dict(business.applied()) == {"m0000": 1}


def test_a_stop_ends_while_nothing_is_heard(quiet: Engine, proxy: TcpProxy) -> None:
    begun = threading.Event()

    def handle(session: Session, _: Message) -> None:
        proxy.swallow_replies()
        begun.set()
        session.execute(text("SELECT 1"))

    worker = make(MemorySource(numbered(1)), quiet, handle)
    worker.start()
    assert begun.wait(BOUND)
    assert worker.stop(BOUND)


def test_a_relay_goes_on(quiet: Engine, engine: Engine, proxy: TcpProxy) -> None:
    broker = RecordingPublisher()
    relay = Relay(adopt(quiet), {"own": broker}, senders=2)
    relay.start()
    with engine.begin() as connection:
        OUTBOX.publish(connection, OWN, "one")
    broker.wait_for(1)
    assert proxy.hush() > 1
    with engine.begin() as connection:
        OUTBOX.publish(connection, OWN, "two")
    broker.wait_for(2)
    assert relay.stop()


def test_a_ledger_goes_on(quiet: Engine, proxy: TcpProxy) -> None:
    ledger = PostgresLedger("mailing", engine=quiet)
    lease = ledger.acquire("m1").lease
    assert lease is not None
    proxy.hush()
    begun = time.monotonic()
    ledger.complete(lease)
    assert time.monotonic() - begun < BOUND


@pytest.mark.parametrize("step", ["renew", "complete", "release"])
def test_one_silent_connection_does_not_lose_a_lease(proxied: Engine, proxy: TcpProxy, step: str) -> None:
    """Others wait for 20 s before they doubt; nobody may take the message over before the ledger has done its step."""
    ledger = PostgresLedger("mailing", engine=proxied)
    lease = ledger.acquire("m1", lease_seconds=SHORT_LEASE).lease
    assert lease is not None
    if step == "renew":
        time.sleep(SHORT_LEASE / 3)  # so that what is left of it tells whether it was renewed
    assert proxy.hush() == 1
    begun = time.monotonic()
    getattr(ledger, step)(lease)
    assert time.monotonic() - begun < SHORT_LEASE * 2 / 3, "as long as the lease goes on"
    assert lease.seconds_left > SHORT_LEASE / 2 or step != "renew"


def test_a_lease_outlasts_connections_that_go_quiet_one_after_the_other(
    proxied: Engine, engine: Engine, proxy: TcpProxy
) -> None:
    ledger, others = PostgresLedger("mailing", engine=proxied), PostgresLedger("mailing", engine=engine)
    lease = ledger.acquire("m1", lease_seconds=SHORT_LEASE).lease
    ended = lease.seconds_left + time.monotonic()
    with LeaseRenewer(ledger).renewing(lease):
        proxy.swallow_replies()
        threading.Timer(SHORT_LEASE / 2, proxy.accept).start()
        while time.monotonic() < ended + 1:
            assert lease.seconds_left
            assert others.acquire("m1").state is LeaseState.IN_FLIGHT
            time.sleep(0.1)


def test_a_ledger_s_statement_that_takes_long_is_left_alone(proxied: Engine, engine: Engine) -> None:
    ledger = PostgresLedger("mailing", engine=proxied)
    lease = ledger.acquire("m1", lease_seconds=SHORT_LEASE).lease
    assert lease is not None
    with engine.connect() as holder, ThreadPoolExecutor() as pool, statements_sent(proxied) as sent:
        holder.exec_driver_sql("SELECT FROM message_lease FOR UPDATE")
        renewed = pool.submit(ledger.renew, lease)
        time.sleep(SHORT_LEASE * 0.6)
        assert not renewed.done()
        holder.rollback()
        renewed.result(BOUND)
        assert sum("UPDATE" in statement for statement in sent) == 1


def test_one_that_goes_quiet_at_sqlalchemys_own_first_look_is_given_up(quiet: Engine, proxy: TcpProxy) -> None:
    proxy.lose_next(b"pg_catalog.version", reaches_server=False, quietly=True)
    begun = time.monotonic()
    assert PostgresLedger("mailing", engine=quiet).acquire("m1").lease is not None
    assert time.monotonic() - begun < BOUND
    assert proxy.lost


def test_a_long_statement_is_left_alone(quiet: Engine) -> None:
    with adopt(quiet).connect() as connection:
        assert connection.execute(text(f"SELECT 1 FROM pg_sleep({LONG})")).scalar_one() == 1


def test_a_connection_that_closes_during_the_question_costs_no_other_one_its_statement(
    quiet: Engine, proxy: TcpProxy
) -> None:
    engine = adopt(quiet)
    with engine.connect() as long, engine.connect() as short, ThreadPoolExecutor() as pool:
        proxy.hold()  # the question has to wait for its connection
        for connection in (short, long):
            connection.detach()  # closed at its end, and not kept
        waiting = pool.submit(long.exec_driver_sql, f"SELECT 1 FROM pg_sleep({2 * LONG})")
        short.exec_driver_sql(f"SELECT 1 FROM pg_sleep({SILENCE + 3 * watchdog.TICK_SECONDS})")
        short.close()
        proxy.accept()
        assert waiting.result(BOUND).rowcount == 1


def test_who_waits_for_a_lock_is_left_alone(quiet: Engine, engine: Engine) -> None:
    Business(engine)
    with engine.connect() as holder, ThreadPoolExecutor() as pool:
        holder.exec_driver_sql("UPDATE account SET balance = 5 WHERE account_id = 1")

        def wait() -> int:
            with adopt(quiet).begin() as connection:
                return connection.exec_driver_sql("UPDATE account SET balance = balance + 1").rowcount

        waiting = pool.submit(wait)
        time.sleep(4 * SILENCE)
        assert not waiting.done()
        holder.commit()
        assert waiting.result(BOUND) == 2


def test_who_waits_for_a_notification_is_left_alone(quiet: Engine, engine: Engine) -> None:
    with adopt(quiet).connect() as connection, ThreadPoolExecutor() as pool:
        connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("LISTEN somewhere")
        driver: Any = connection.connection.driver_connection
        heard = pool.submit(lambda: next(iter(driver.notifies(stop_after=1))))
        time.sleep(4 * SILENCE)
        with engine.begin() as other:
            other.exec_driver_sql("NOTIFY somewhere, 'hello'")
        assert heard.result(BOUND).payload == "hello"


def test_behind_a_pooler_a_long_statement_is_left_alone_and_a_lost_commit_is_not(
    make_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction_pooler(make_database(), size=4) as (pooler, url), TcpProxy("127.0.0.1", pooler.port) as proxy:
        engine = open_engine(
            make_url(url).set(port=proxy.port), connect_args={"txbox_watchdog_seconds": SILENCE}, max_overflow=0
        )
        with engine.connect() as connection:
            assert connection.execute(text(f"SELECT 1 FROM pg_sleep({LONG})")).scalar_one() == 1
        monkeypatch.setattr(watchdog, "UNKNOWN_SECONDS", 1.0)
        with engine.connect() as connection:
            connection.execute(text("SELECT 1"))
            proxy.lose_next(COMMIT, reaches_server=True)
            proxy.hush()
            with pytest.raises(OperationalError, match="has not answered for"):
                connection.execute(text("SELECT 2"))
        engine.dispose()


def test_behind_a_pooler_one_silent_connection_does_not_lose_a_lease(
    make_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "UNKNOWN_SECONDS", 30.0)
    with transaction_pooler(make_database(), size=4) as (pooler, url), TcpProxy("127.0.0.1", pooler.port) as proxy:
        engine = open_engine(make_url(url).set(port=proxy.port))
        with engine.begin() as connection:
            tables().metadata.create_all(connection)
        ledger = PostgresLedger("mailing", engine=engine)
        lease = ledger.acquire("m1", lease_seconds=SHORT_LEASE).lease
        assert lease is not None
        assert proxy.hush()
        begun = time.monotonic()
        ledger.renew(lease)
        assert time.monotonic() - begun < SHORT_LEASE * 2 / 3
        engine.dispose()


def test_behind_a_pooler_whose_servers_are_all_busy_the_wait_goes_on(make_database: Callable[..., str]) -> None:
    with transaction_pooler(make_database(), size=1) as (_, url), ThreadPoolExecutor() as pool:
        engine = open_engine(url, connect_args={"txbox_watchdog_seconds": SILENCE})
        with engine.connect() as one, engine.connect() as other:
            one.execute(text("SELECT 1"))
            # The one server is held by this transaction, and the other waits for it: no server is left to say so.
            waiting = pool.submit(lambda: other.execute(text("SELECT 2")).scalar_one())
            assert one.execute(text(f"SELECT 1 FROM pg_sleep({SILENCE + 2 * ANSWER})")).scalar_one() == 1
            assert not waiting.done()
            one.rollback()
            assert waiting.result(2 * BOUND) == 2
        engine.dispose()


def test_connections_have_keepalives_and_the_caller_s_values_win(schema_url: str) -> None:
    ours = open_engine(schema_url)
    theirs = adopt(create_engine(f"{schema_url}&tcp_user_timeout=7000", connect_args={"keepalives_idle": 99}))
    expected = {name: str(value) for name, value in KEEPALIVES.items() if name != "keepalives"}  # 1 is libpq's own
    for engine, wanted in (
        (ours, expected),
        (theirs, {**expected, "tcp_user_timeout": "7000", "keepalives_idle": "99"}),
    ):
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert wanted.items() <= driver.info.get_parameters().items()
        engine.dispose()


@pytest.mark.parametrize("given", ["soon", "-1", "inf"])
def test_what_is_no_number_of_seconds_is_refused(schema_url: str, given: str) -> None:
    engine = adopt(create_engine(f"{schema_url}&txbox_watchdog_seconds={given}"))
    with pytest.raises(InvalidConfiguration, match="txbox_watchdog_seconds"):
        engine.connect()


def test_it_can_be_switched_off(schema_url: str, proxy: TcpProxy) -> None:
    url = make_url(schema_url).set(host="127.0.0.1", port=proxy.port)
    engine = adopt(create_engine(url.update_query_dict({"txbox_watchdog_seconds": "0"})))
    with engine.connect() as connection, ThreadPoolExecutor() as pool:
        proxy.hush()
        waiting = pool.submit(connection.exec_driver_sql, "SELECT 1")
        time.sleep(4 * SILENCE)
        assert not waiting.done()
        proxy.cut()
        with pytest.raises(OperationalError):
            waiting.result(BOUND)
    engine.dispose()
