"""The worker over the outbox of its own database: what it costs, who works on what, and what others do to the table."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.orm import Session

from support.postgres.statements import run
from support.postgres.tcp_proxy import CountingProxy
from support.waiting import wait_until
from support.workers.business import ADD, Business, apply, once
from txbox import DeadLetters, Inbox, InvalidConfiguration, Message, Outbox, SqlEffect
from txbox.backoff import Backoff
from txbox.leases import PostgresLedger
from txbox.outbox import Outgoing
from txbox.relay import poller
from txbox_workers.postgres import PostgresSource, PostgresWorker, source
from txbox_workers.worker import Worker

BILLING = "inbox:billing"

IN_SQL = "UPDATE account SET balance = balance + (SELECT count(*) FROM fresh_event) WHERE account_id = 1"

TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'victim' AND random() < 0.3"""


@pytest.fixture(autouse=True)
def _claims_are_shared_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "CLAIM_SECONDS", 0.2)
    monkeypatch.setattr(source, "RENEWAL_SECONDS", 0.2)


def publish(engine: Engine, *messages: Outgoing) -> None:
    with engine.begin() as connection:
        Outbox().publish_many(connection, messages)


def numbered(count: int, key: Callable[[int], str | None] = lambda _: None) -> list[Outgoing]:
    return [Outgoing(BILLING, b"{}", key=key(number), message_id=f"m{number:05}") for number in range(count)]


def waiting(business: Business) -> list[str]:
    return list(business.rows("SELECT message_id FROM outbox_message ORDER BY position"))


@contextmanager
def running(engine: Engine, handler: Any = apply, **options: Any) -> Iterator[PostgresWorker]:
    worker = PostgresWorker(inbox=Inbox("billing"), engine=engine, handler=handler, **options)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


@pytest.fixture
def proxied(schema_url: str, proxy: CountingProxy) -> Iterator[Engine]:
    engine = create_engine(make_url(schema_url).set(host="127.0.0.1", port=proxy.port), pool_use_lifo=True)
    yield engine
    engine.dispose()


# --- costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "trips"),
    [
        ({"handler": lambda session, _: session.execute(ADD, {"account": 1, "amount": 1})}, 3),
        ({"batch_handler": lambda session, _: session.execute(ADD, {"account": 1, "amount": 10})}, 3),
        (
            {"effect": SqlEffect.of(IN_SQL, fields="x int default 0")},
            2,
        ),
    ],
    ids=["message", "batch", "SQL"],
)
def test_to_settle_costs_no_round_trip(
    engine: Engine, business: Business, proxied: Engine, proxy: CountingProxy, how: dict[str, Any], trips: int
) -> None:
    count = 1 if "handler" in how else 10
    with closing(PostgresSource(engine, "billing")) as messages:
        worker = Worker(messages, inbox=Inbox("billing"), engine=proxied, **how)
        for _ in range(4):  # the first one connects, and the next ones prepare statements
            publish(engine, *[Outgoing(BILLING, b"{}") for _ in range(count)])
            deliveries = []
            while len(deliveries) < count:
                deliveries += messages.receive()
            before = proxy.packets
            (settlements,) = worker._processor.process(deliveries)
            spent = proxy.packets - before
            assert waiting(business) == [], "it is settled with the commit"
            assert set(messages.ack(deliveries)) == {one.receipt for one in deliveries}
            assert proxy.packets - before == spent
            assert len(settlements) == count
        assert spent == trips


def test_a_table_that_was_small_is_not_scanned_once_it_has_grown(
    engine: Engine, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans that were made while it was small are kept."""
    monkeypatch.setattr(poller, "MAX_FRESH", 3_000)
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("VACUUM outbox_message")
    own = create_engine(engine.url)
    with running(own, handler=None, batch_handler=lambda *_: None, threads=1, batch_size=1):
        for number in range(1, 21):
            publish(engine, Outgoing(BILLING, b"{}"))
            wait_until(lambda number=number: len(business.recorded()) == number)
        publish(engine, *numbered(6_000))
        wait_until(lambda: business.rows("SELECT count(*) FROM processed_message") == [6_020])
    own.dispose()  # what its sessions have done is reported when they end
    deleted, scanned = (
        f"SELECT {column} FROM pg_stat_all_tables WHERE relid = 'outbox_message'::regclass"
        for column in ("n_tup_del", "seq_tup_read")
    )
    wait_until(lambda: business.rows(deleted)[0] >= 6_020, "the sessions have reported")
    by_the_first_polls_that_see_it = 10 * 6_020
    assert business.rows(scanned)[0] <= by_the_first_polls_that_see_it


def test_an_idle_worker_asks_at_most_twice_a_second(
    engine: Engine, business: Business, proxied: Engine, proxy: CountingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    publish(engine, *numbered(1))
    with running(proxied) as worker:
        wait_until(lambda: business.applied() == once(["m00000"]))
        messages = worker.source
        assert isinstance(messages, PostgresSource)
        wait_until(lambda: messages._reader is not None and messages._reader._awake_until < time.monotonic(), "idle")
        before, began = proxy.packets, time.monotonic()
        time.sleep(6)  # nothing signals that nothing happens
        # A report, every 2.4 to 3 seconds, is two queries between BEGIN and COMMIT, each a packet of its own.
        transactions = 2 * 3
        edges = 2  # of the time that is measured
        assert proxy.packets - before - transactions <= 2 * (time.monotonic() - began) + edges
        publish(engine, Outgoing(BILLING, b"{}", message_id="late"))
        wait_until(lambda: business.applied()["late"] == 1, timeout=5)


# --- who works on what -----------------------------------------------------------------------------------------------


def test_the_lanes_are_shared_by_those_who_want_messages(engine: Engine) -> None:
    with closing(PostgresSource(engine, "billing")) as one, closing(PostgresSource(engine, "billing")) as other:
        one.receive()
        wait_until(lambda: len(one._claims.owned) == 64)

        def shared() -> bool:
            one.receive()
            other.receive()
            return len(one._claims.owned) == len(other._claims.owned) == 32

        wait_until(shared)
        assert not one._claims.owned & other._claims.owned
        other.close()

        def alone() -> bool:
            one.receive()
            return len(one._claims.owned) == 64

        wait_until(alone)


@pytest.mark.parametrize("ordered", [False, True])
def test_sessions_that_are_terminated_cost_nothing_but_time(engine: Engine, business: Business, ordered: bool) -> None:
    """Those of claims, of the reader, of the listener and of handlers, again and again."""
    messages = numbered(600, key=lambda number: str(number % 7))
    ids = [one.message_id or "" for one in messages]
    own = create_engine(engine.url, connect_args={"application_name": "victim"})
    with running(own, threads=4, ordered=ordered, max_attempts=None if not ordered else 50) as worker:
        publish(engine, *messages)
        for applied in range(0, 600, 50):
            wait_until(lambda applied=applied: len(business.order()) >= applied)
            run(engine, TERMINATE)
        wait_until(lambda: business.applied() == once(ids), timeout=60)
        assert worker.running
    own.dispose()
    assert waiting(business) == []
    assert business.letters() == {}
    if ordered:
        for key in range(7):
            of_key = [id_ for id_ in business.order() if int(id_[1:]) % 7 == key]
            assert of_key == sorted(of_key)


def test_a_slow_key_delays_no_other(engine: Engine, business: Business) -> None:
    """Not even those of its lane that were published behind thousands of its messages."""
    going = threading.Event()

    def handler(session: Session, message: Message) -> None:
        if message.headers["key"] == "slow":
            going.wait(60)
        apply(session, message)

    slow = [Outgoing(BILLING, b"{}", key="slow", message_id=f"s{number:05}") for number in range(1_000)]
    publish(engine, *slow, *numbered(500, key=lambda number: f"k{number % 100}"))
    with running(engine, handler, threads=3, ordered=True):
        try:
            wait_until(lambda: len(business.order()) == 500, "the others are done", timeout=30)
            assert {id_[0] for id_ in business.order()} == {"m"}
        finally:
            going.set()
        wait_until(lambda: len(business.order()) == 1_500, timeout=60)
    assert [id_ for id_ in business.order() if id_[0] == "s"] == [one.message_id for one in slow]


def test_a_failed_message_holds_its_key_and_no_other(engine: Engine, business: Business) -> None:
    failing = threading.Event()

    def handler(session: Session, message: Message) -> None:
        if message.id == "m00001" and not failing.is_set():
            raise ValueError("not yet")
        apply(session, message)

    publish(engine, *numbered(40, key=lambda number: str(number % 2)))
    with running(engine, handler, ordered=True, max_attempts=100):
        wait_until(lambda: len(business.order()) == 20)
        wait_until(lambda: business.rows("SELECT attempts FROM outbox_message WHERE held") not in ([], [0]))
        assert {int(id_[1:]) % 2 for id_ in business.order()} == {0}
    failing.set()
    with running(engine, handler, ordered=True, max_attempts=100):  # another one waits for its time, too
        wait_until(lambda: len(business.order()) == 40, timeout=60)
    odd = [id_ for id_ in business.order() if int(id_[1:]) % 2]
    assert odd == sorted(odd)
    assert business.letters() == {}


def test_what_a_process_may_have_begun_when_it_died_counts_as_delivered_before(engine: Engine) -> None:
    publish(engine, *numbered(3))
    with closing(PostgresSource(engine, "billing")) as dies:
        first = []
        while len(first) < 3:
            first += dies.receive()
        assert {one.receive_count for one in first} == {1}
    publish(engine, Outgoing(BILLING, b"{}", message_id="later"))
    with closing(PostgresSource(engine, "billing")) as after:
        again = []
        while len(again) < 4:
            again += after.receive()
    counts = {one.message.id: one.receive_count for one in again}
    assert counts == {"m00000": 2, "m00001": 2, "m00002": 2, "later": 1}


# --- what others do to the table -------------------------------------------------------------------------------------


def test_a_table_that_is_rewritten_between_reading_and_settling(engine: Engine, business: Business) -> None:
    """The places of the rows are others then: what they hold now must not be deleted in their stead."""
    publish(engine, *numbered(30))
    with closing(PostgresSource(engine, "billing")) as messages:
        deliveries = []
        while len(deliveries) < 10:
            deliveries += messages.receive()
        gone = sorted(set(waiting(business)) - {one.message.id for one in deliveries})[:7]
        run(engine, f"DELETE FROM outbox_message WHERE message_id IN ({', '.join(map(repr, gone))})")
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM FULL outbox_message")
        worker = Worker(messages, inbox=Inbox("billing"), engine=engine, handler=apply)
        list(worker._processor.process(deliveries))
        messages.ack(deliveries)
    with running(engine):
        wait_until(lambda: not waiting(business))
    assert business.applied() == once(one.message_id or "" for one in numbered(30)) - once(gone)


def test_rows_that_only_a_person_can_insert(engine: Engine, business: Business) -> None:
    publish(engine, *numbered(3))
    run(engine, """UPDATE outbox_message SET headers = '["no", "headers"]' WHERE message_id = 'm00001'""")
    run(engine, "UPDATE outbox_message SET message_id = '' WHERE message_id = 'm00002'")
    (nameless,) = business.rows("SELECT position FROM outbox_message WHERE message_id = ''")
    with running(engine):
        wait_until(lambda: not waiting(business))
    assert business.letters() == {"m00001": "malformed", f"position {nameless}": "malformed"}
    assert business.applied() == once(["m00000"])


def test_a_message_that_was_delayed_for_longer_than_is_remembered_is_not_expired(
    engine: Engine, business: Business
) -> None:
    publish(engine, Outgoing(BILLING, b"{}", message_id="delayed", delay=timedelta(seconds=0.5)))
    run(engine, "UPDATE outbox_message SET published_at = published_at - interval '30 days'")
    run(engine, "INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES ('billing', now() - interval '1 day')")
    with running(engine):
        wait_until(lambda: not waiting(business))
    assert business.letters() == {}
    assert business.applied() == once(["delayed"])


def test_a_worker_can_be_started_again(engine: Engine, business: Business) -> None:
    worker = PostgresWorker(inbox=Inbox("billing"), engine=engine, handler=apply)
    for number in range(3):
        publish(engine, Outgoing(BILLING, b"{}", message_id=str(number)))
        worker.start()
        wait_until(lambda: not waiting(business))
        assert worker.stop()
    assert business.applied() == once(["0", "1", "2"])


def test_a_ledger_alone_takes_the_messages_of_its_subscriber(engine: Engine, business: Business) -> None:
    seen: list[str] = []
    ledger = PostgresLedger("billing", engine=engine)
    letters = DeadLetters(engine)

    def handler(message: Message) -> None:
        if message.id == "m00001":
            raise ValueError("never")
        seen.append(message.id)

    publish(engine, *numbered(4))
    worker = PostgresWorker(ledger=ledger, dead_letters=letters, handler=handler, max_attempts=2, backoff=Backoff(0, 0))
    worker.start()
    wait_until(lambda: not waiting(business))
    assert worker.stop()
    assert sorted(seen) == ["m00000", "m00002", "m00003"]
    assert business.letters() == {"m00001": "failed"}


def test_a_worker_without_a_database_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidConfiguration, match=r"needs inbox=Inbox\(…\) and engine=…, or ledger="):
        PostgresWorker(ledger=PostgresLedger("billing", engine=engine), handler=lambda _: None)
