"""Outages between the worker and its servers: nothing is lost, nothing is applied twice, nobody is parked for it."""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from support.aws.queues import held, send, wait_until_empty
from support.postgres.tcp_proxy import TcpProxy
from support.txbox.events import Kept
from support.waiting import wait_until
from support.workers import memory_worker
from support.workers.business import ADD, Business, apply, once
from support.workers.memory_worker import at_work, feed, messages
from txbox import Inbox, Message, Outcome
from txbox.backoff import Backoff
from txbox.instrumentation import BrokerLost, BrokerRestored, DatabaseLost, DatabaseRestored, Received, Settled
from txbox.schema import tables
from txbox_aws.sqs import SqsWorker
from txbox_local import LocalAws, LocalPostgres
from txbox_workers.memory_source import MemorySource
from txbox_workers.polling import context
from txbox_workers.worker import Worker

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

DELETE = b"DeleteMessageBatch"


def pay(session: Session, message: Message) -> None:
    apply(session, message)
    session.execute(ADD, {"account": 1, "amount": 1})


def make(source: MemorySource, engine: Engine, handler: Any = pay, **options: Any) -> Worker:
    return memory_worker.make(source, engine, handler, **options)


def applied_exactly_once(business: Business, *ids: str) -> None:
    assert business.applied() == once(ids)
    assert business.balance() == len(ids)
    assert business.letters() == {}


def settled_exactly_once(business: Business, *ids: str) -> None:
    applied_exactly_once(business, *ids)
    assert business.failing() == {}


@pytest.fixture
def growing_pauses(short_pauses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that have room to grow, in place of those that have none."""
    monkeypatch.setattr(context, "OUTAGE_BACKOFF", Backoff(first_seconds=0.02, longest_seconds=0.5))


def begin_small_and_grow(lost: Sequence[BrokerLost | DatabaseLost]) -> None:
    """Check the pauses of an outage from its beginning: each is drawn from a range that begins where the last ended."""
    for number, event in enumerate(lost):
        longest = 0.02 * 2**number
        assert longest / 2 <= event.pause_seconds <= longest, [event.pause_seconds for event in lost]


# --- the database ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_reports")
@pytest.mark.parametrize("transactions", ["batch", "message"])
@pytest.mark.parametrize("reaches_server", [True, False])
def test_a_lost_answer_to_commit_is_taken_for_neither_yes_nor_no(
    proxy: TcpProxy, proxied: Engine, business: Business, reaches_server: bool, transactions: str
) -> None:
    kept = Kept()
    source = MemorySource()
    with at_work(make(source, proxied, transactions=transactions, hooks=[kept])):
        proxy.lose_next(reaches_server=reaches_server)
        feed(source, messages("a", "b", "c"))
        assert source.wait_until_empty(20)
    assert proxy.lost == 1
    settled_exactly_once(business, "a", "b", "c")
    outcomes = [outcome for id_ in "abc" for outcome in kept.outcomes(id_)]
    assert Outcome.IN_FLIGHT in outcomes
    assert (Outcome.DUPLICATE in outcomes) is reaches_server


def test_commit_after_commit_is_lost(proxy: TcpProxy, proxied: Engine, business: Business) -> None:
    source = MemorySource(batch_size=3)
    ids: list[str] = []
    with at_work(make(source, proxied, threads=2)):
        for number in range(1, 8):
            proxy.lose_next(reaches_server=number % 2 == 0)
            ids += [f"m{number}-{letter}" for letter in "ab"]
            feed(source, messages(*ids[-2:]))
            wait_until(lambda number=number: proxy.lost == number)
        proxy.accept()
        assert source.wait_until_empty(20)
    settled_exactly_once(business, *ids)


@pytest.mark.parametrize("how", ["cut", "terminate", "cut while waiting for the answer", "cut after a time-out"])
def test_a_connection_that_is_lost_in_the_handler_is_not_the_handler_s_failure(
    proxy: TcpProxy, proxied: Engine, engine: Engine, business: Business, how: str
) -> None:
    runs = []

    def handle(session: Session, message: Message) -> None:
        pay(session, message)
        runs.append(message.id)
        if len(runs) > 1:
            return
        if how == "cut":
            proxy.cut()
        elif how == "terminate":
            pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
            with engine.connect() as other:
                other.exec_driver_sql("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        elif how == "cut after a time-out":
            give_up_waiting_and_lose(session)
        else:
            proxy.swallow_replies()
            threading.Timer(0.2, lambda: (proxy.accept(), proxy.cut())).start()
            session.execute(text("SELECT 1"))

    def give_up_waiting_and_lose(session: Session) -> None:
        try:  # as asyncio.timeout does it
            try:
                raise asyncio.CancelledError
            except asyncio.CancelledError as cancelled:
                raise TimeoutError from cancelled
        except TimeoutError:
            proxy.cut()
            try:
                session.execute(text("SELECT 1"))
            except DBAPIError as lost:
                raise RuntimeError("the repository") from lost

    source = MemorySource(messages("a", "b", "c"))
    with at_work(make(source, proxied, handle, max_attempts=1)):
        assert source.wait_until_empty(20)
    settled_exactly_once(business, "a", "b", "c")


def test_a_database_that_refuses_for_a_while_is_waited_for(
    proxy: TcpProxy, proxied: Engine, business: Business
) -> None:
    kept = Kept()
    source = MemorySource(messages("a"))
    with at_work(make(source, proxied, hooks=[kept], threads=2)):
        assert source.wait_until_empty(20)
        proxy.refuse()
        proxy.cut()
        feed(source, messages("b", "c", "d"))
        wait_until(lambda: len(kept.of(DatabaseLost)) >= 6)
        taken = len(kept.of(Received))
        assert not kept.of(DatabaseRestored)
        proxy.accept()
        assert source.wait_until_empty(20)
    assert taken <= 4, "a worker without a database leaves the messages to others"
    settled_exactly_once(business, "a", "b", "c", "d")
    assert kept.of(DatabaseRestored)


@pytest.mark.usefixtures("growing_pauses", "without_reports")
def test_pauses_grow_while_the_database_is_away_and_begin_small_the_next_time(
    proxy: TcpProxy, proxied: Engine, business: Business
) -> None:
    kept = Kept()
    source = MemorySource()
    with at_work(make(source, proxied, hooks=[kept])):
        for id_ in "ab":
            before = len(kept.of(DatabaseLost))
            proxy.refuse()
            proxy.cut()
            source.send(messages(id_)[0])
            wait_until(lambda before=before: len(kept.of(DatabaseLost)) >= before + 5)
            begin_small_and_grow(kept.of(DatabaseLost)[before : before + 5])
            proxy.accept()
            assert source.wait_until_empty(20)
    assert len(kept.of(DatabaseRestored)) == 2
    settled_exactly_once(business, "a", "b")


def test_a_pool_of_stale_connections_costs_nobody_an_attempt(
    proxy: TcpProxy, proxied: Engine, business: Business
) -> None:
    everybody = threading.Barrier(4)
    ids = [f"m{number}" for number in range(40)]
    met = threading.local()

    def handle(session: Session, message: Message) -> None:
        if not getattr(met, "once", False):
            met.once = True
            everybody.wait(60)
        pay(session, message)

    source = MemorySource(messages(*ids[:20]), batch_size=2)
    with at_work(make(source, proxied, handle, threads=4)):
        assert source.wait_until_empty(20)
        assert proxy.cut() >= 4
        feed(source, messages(*ids[20:]))
        assert source.wait_until_empty(20)
    settled_exactly_once(business, *ids)


def test_a_database_that_falls_silent_holds_the_worker_until_the_connection_breaks(
    proxy: TcpProxy, proxied: Engine, business: Business
) -> None:
    source = MemorySource(messages("a"))
    worker = make(source, proxied)
    worker.start()
    assert source.wait_until_empty(20)
    proxy.swallow_replies()
    source.send(messages("b")[0])
    wait_until(lambda: not source._ready)
    assert worker.stop(0.2) is False
    proxy.accept()
    proxy.cut()
    assert worker.stop(20) is True
    with at_work(make(source, proxied)):
        assert source.wait_until_empty(20)
    settled_exactly_once(business, "a", "b")


@pytest.fixture
def own_postgres() -> Iterator[LocalPostgres]:
    """A server that a test may stop and start."""
    directory = Path(tempfile.mkdtemp(prefix="txbox-outage-"))
    directory.chmod(0o755)
    server = LocalPostgres(directory / "postgres", durable=False).start()
    yield server
    server.stop()
    shutil.rmtree(directory, ignore_errors=True)


def test_a_restart_of_postgres_in_the_middle_of_everything(own_postgres: LocalPostgres) -> None:
    engine = create_engine(own_postgres.url, pool_size=10)
    with engine.begin() as connection:
        tables().metadata.create_all(connection)
    business = Business(engine)
    ids = [f"m{number:03}" for number in range(60)]
    half, restarted = threading.Event(), threading.Event()

    def handle(session: Session, message: Message) -> None:
        pay(session, message)
        if message.id == ids[30] and not half.is_set():
            half.set()
            assert restarted.wait(60)

    kept = Kept()
    source = MemorySource(messages(*ids), batch_size=4)
    with at_work(make(source, engine, handle, threads=2, hooks=[kept])):
        assert half.wait(20)
        port = own_postgres.port
        own_postgres.stop()
        own_postgres._fixed_port = port
        restarted.set()
        wait_until(lambda: len(kept.of(DatabaseLost)) >= 3)
        own_postgres.start()
        assert source.wait_until_empty(30)
    settled_exactly_once(business, *ids)
    engine.dispose()


# --- SQS -------------------------------------------------------------------------------------------------------------


class Queue:
    """A queue, seen through a proxy by the worker and directly by the test."""

    def __init__(self, sqs: "SQSClient", url: str, proxy: TcpProxy) -> None:
        self.direct = sqs
        self.url = url
        self.proxy = proxy
        self.client = boto3.client(
            "sqs",
            endpoint_url=f"http://127.0.0.1:{proxy.port}",
            config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5),
        )


@pytest.fixture
def remote(aws: LocalAws, sqs: "SQSClient", queue: str) -> Iterator[Queue]:
    with TcpProxy("127.0.0.1", int(aws.endpoint_url.rsplit(":", 1)[1])) as proxy:
        remote = Queue(sqs, queue, proxy)
        yield remote
        remote.client.close()


def sqs_worker(remote: Queue, engine: Engine, **options: Any) -> SqsWorker:
    options.setdefault("handler", pay)
    options.setdefault("visibility_seconds", 1)
    inbox = Inbox("billing", wait_seconds=0.2)
    return SqsWorker(remote.url, inbox=inbox, engine=engine, client=remote.client, wait_seconds=1, **options)


@pytest.mark.usefixtures("growing_pauses")
def test_pauses_grow_while_sqs_is_away_and_begin_small_the_next_time(
    engine: Engine, business: Business, remote: Queue
) -> None:
    kept = Kept()
    with at_work(sqs_worker(remote, engine, hooks=[kept])):
        for outage, id_ in enumerate("ab", 1):
            before = len(kept.of(BrokerLost))
            remote.proxy.refuse()
            # Over and over: a connection could be accepted just before, and be one of the proxy's just after.
            wait_until(lambda before=before: remote.proxy.cut() == 0 and len(kept.of(BrokerLost)) >= before + 5)
            begin_small_and_grow(kept.of(BrokerLost)[before : before + 5])
            send(remote.direct, remote.url, [id_])
            remote.proxy.accept()
            wait_until(lambda outage=outage: len(kept.of(BrokerRestored)) == outage)
            wait_until_empty(remote.direct, remote.url)
    settled_exactly_once(business, "a", "b")


@pytest.mark.parametrize("reaches_server", [True, False])
def test_a_lost_delete_leads_to_a_duplicate_at_worst(
    engine: Engine, business: Business, remote: Queue, reaches_server: bool
) -> None:
    kept = Kept()
    remote.proxy.lose_next(DELETE, reaches_server=reaches_server)
    send(remote.direct, remote.url, ["a", "b", "c"])
    with at_work(sqs_worker(remote, engine, hooks=[kept])):
        wait_until(lambda: remote.proxy.lost)
        wait_until_empty(remote.direct, remote.url)
    settled_exactly_once(business, "a", "b", "c")
    unconfirmed = [event for event in kept.of(Settled) if event.outcome is Outcome.PROCESSED and not event.acked]
    assert unconfirmed, "what SQS did not confirm is not called acked"
    assert bool([event for event in kept.of(Settled) if event.outcome is Outcome.DUPLICATE]) is not reaches_server


@pytest.mark.parametrize("reaches_server", [True, False])
def test_a_lost_answer_to_a_receive_delays_and_loses_nothing(
    engine: Engine, business: Business, remote: Queue, reaches_server: bool
) -> None:
    send(remote.direct, remote.url, ["a", "b", "c"])
    remote.proxy.lose_next(b"ReceiveMessage", reaches_server=reaches_server)
    with at_work(sqs_worker(remote, engine)):
        wait_until_empty(remote.direct, remote.url)
    assert remote.proxy.lost == 1
    settled_exactly_once(business, "a", "b", "c")


def test_sqs_is_away_while_a_handler_runs(engine: Engine, business: Business, remote: Queue) -> None:
    def handle(session: Session, message: Message) -> None:
        pay(session, message)
        if not remote.proxy._refusing and message.id == "a" and remote.proxy.lost == 0:
            remote.proxy.lost += 1
            remote.proxy.refuse()
            remote.proxy.cut()

    kept = Kept()
    send(remote.direct, remote.url, ["a", "b"])
    with at_work(sqs_worker(remote, engine, handler=handle, hooks=[kept])):
        wait_until(lambda: kept.of(BrokerLost))
        wait_until(lambda: held(remote.direct, remote.url)["waiting"] == 2)
        remote.proxy.accept()
        wait_until_empty(remote.direct, remote.url)
    settled_exactly_once(business, "a", "b")


def test_both_servers_stumble_over_and_over(
    remote: Queue, proxy: TcpProxy, proxied: Engine, business: Business
) -> None:
    ids = [f"m{number:03}" for number in range(80)]
    send(remote.direct, remote.url, ids)
    stumbles: list[Callable[[], object]] = [
        lambda: proxy.lose_next(reaches_server=True),
        lambda: remote.proxy.lose_next(DELETE, reaches_server=False),
        proxy.cut,
        lambda: proxy.lose_next(reaches_server=False),
        remote.proxy.cut,
        lambda: remote.proxy.lose_next(DELETE, reaches_server=True),
    ]
    with at_work(sqs_worker(remote, proxied, threads=2), sqs_worker(remote, proxied)):
        for stumble in stumbles * 2:
            before = len(business.applied())
            stumble()
            wait_until(lambda before=before: len(business.applied()) > before or len(business.applied()) == len(ids))
        wait_until_empty(remote.direct, remote.url)
    # Attempts are forgotten after the commit, as far as the connection lasts: some that nothing rests on may stay.
    applied_exactly_once(business, *ids)
