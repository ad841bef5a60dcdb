"""Outages between a worker and the database that has its messages, too: nothing is lost, nothing is applied twice."""

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from support.postgres.tcp_proxy import TcpProxy
from support.txbox.events import Kept
from support.waiting import wait_until
from support.workers.business import Business, apply, once
from support.workers.memory_worker import AT_ONCE, at_work, messages
from txbox import BrokerError, DeadLetters, Inbox, Message, Outbox, Outcome, Outgoing, SqlEffect
from txbox.instrumentation import BrokerLost, BrokerRestored, DatabaseLost, Settled
from txbox.schema import tables
from txbox_local import LocalPostgres
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.postgres import PostgresSource, PostgresWorker, source
from txbox_workers.postgres.lane_claims import LaneClaims

OUTBOX = Outbox()


def publish(engine: Engine, sent: list[Message], key: str | None = None) -> None:
    with engine.begin() as connection:
        OUTBOX.publish_many(connection, [Outgoing("inbox:billing", one.body, key, None, one.id) for one in sent])


def waiting(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.exec_driver_sql("SELECT message_id FROM outbox_message ORDER BY position").scalars())


def make(engine: Engine, handler: Any = apply, **options: Any) -> PostgresWorker:
    if "effect" not in options:
        options["handler"] = handler
    return PostgresWorker(inbox=Inbox("billing", wait_seconds=0.2), engine=engine, backoff=AT_ONCE, **options)


@pytest.fixture(autouse=True)
def _quick_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "CLAIM_SECONDS", 0.2)
    monkeypatch.setattr(source, "WAIT_SECONDS", 0.1)


@pytest.mark.usefixtures("without_reports")
@pytest.mark.parametrize("transactions", ["batch", "message"])
@pytest.mark.parametrize("reaches_server", [True, False])
def test_a_lost_answer_to_commit_is_taken_for_neither_yes_nor_no(
    proxy: TcpProxy, proxied: Engine, engine: Engine, business: Business, reaches_server: bool, transactions: str
) -> None:
    kept = Kept()

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if not proxy.lost:
            proxy.lose_next(reaches_server=reaches_server)

    publish(engine, messages("a", "b", "c"))
    with at_work(make(proxied, handle, transactions=transactions, hooks=[kept])):
        wait_until(lambda: not waiting(engine))
    assert proxy.lost >= 1
    assert business.applied() == once("abc")
    assert (business.letters(), business.failing()) == ({}, {})
    outcomes = [event.outcome for event in kept.of(Settled)]
    assert Outcome.IN_FLIGHT in outcomes
    assert Outcome.DUPLICATE not in outcomes, "what has committed does not come again"


@pytest.mark.usefixtures("without_reports")
@pytest.mark.parametrize("reaches_server", [True, False])
def test_a_lost_answer_to_the_commit_of_an_effect_is_neither_yes_nor_no(
    proxy: TcpProxy, proxied: Engine, engine: Engine, business: Business, reaches_server: bool
) -> None:
    """The effect's text, which goes out with the commit, tells it from those of the source."""
    kept = Kept()
    effect = SqlEffect.of(
        "INSERT INTO effect (message_id, body) SELECT message_id, '' FROM fresh_event", fields="a int"
    )
    with at_work(make(proxied, effect=effect, hooks=[kept])):
        proxy.lose_next(b"INSERT INTO effect", reaches_server=reaches_server)
        publish(engine, [Message(id_, b'{"a": 1}') for id_ in "abc"])
        wait_until(lambda: not waiting(engine))
    assert proxy.lost == 1
    assert business.applied() == once("abc")
    assert (business.letters(), business.failing()) == ({}, {})
    assert not [event for event in kept.of(Settled) if event.outcome is Outcome.DUPLICATE]


def test_a_database_that_refuses_for_a_while_is_waited_for(
    proxy: TcpProxy, proxied: Engine, engine: Engine, business: Business
) -> None:
    kept = Kept()
    publish(engine, messages("a"))
    with at_work(make(proxied, hooks=[kept], threads=2)):
        wait_until(lambda: not waiting(engine))
        for id_ in "bc":
            lost = len(kept.of(BrokerLost))
            proxy.refuse()
            proxy.cut()
            publish(engine, messages(id_))
            wait_until(lambda lost=lost: len(kept.of(BrokerLost)) >= lost + 4)
            proxy.accept()
            wait_until(lambda: not waiting(engine))
    assert 2 <= len(kept.of(BrokerRestored)) <= 4, "of each thread that has noticed"
    assert business.applied() == once("abc")
    assert (business.letters(), business.failing()) == ({}, {})


def test_a_database_that_falls_silent_holds_a_stop_until_the_connection_breaks(
    proxy: TcpProxy, proxied: Engine, engine: Engine, business: Business
) -> None:
    publish(engine, messages("a"))
    worker = make(proxied)
    worker.start()
    wait_until(lambda: not waiting(engine))
    proxy.swallow_replies()
    publish(engine, messages("b"))
    time.sleep(0.3)  # until each of its connections waits for an answer
    assert worker.stop(0.2) is False
    proxy.accept()
    proxy.cut()
    assert worker.stop(20) is True
    proxied.dispose()  # a start does not try again
    with at_work(make(proxied)):
        wait_until(lambda: not waiting(engine))
    assert business.applied() == once("ab")
    wait_until(lambda: not claimers())


def claimers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "txbox-claims"]


def test_a_thread_that_outlives_its_closed_source_leaves_the_claims_of_the_next_one_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "CLAIM_SECONDS", 60)
    entered, go_on = threading.Event(), threading.Event()
    work = LaneClaims.work

    def hangs_once(claims: LaneClaims, **options: Any) -> None:
        if not entered.is_set():
            entered.set()
            go_on.wait(20)
            raise ConnectionError
        work(claims, **options)

    monkeypatch.setattr(LaneClaims, "work", hangs_once)
    queue = PostgresSource(engine, "billing")
    queue.receive()
    assert entered.wait(20)
    (late,) = claimers()
    queue.close()
    publish(engine, messages("a"))
    delivery = receive(queue)
    go_on.set()
    late.join(20)
    assert len(queue._claims.owned) == len(queue._backlog.lanes) == 64
    assert queue.ack([delivery]) == {delivery.receipt}
    queue.close()


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
    engine, watching = create_engine(own_postgres.url, pool_size=10), create_engine(own_postgres.url)
    with watching.begin() as connection:
        tables().metadata.create_all(connection)
    business = Business(watching)
    ids = [f"m{number:03}" for number in range(60)]
    half, restarted = threading.Event(), threading.Event()

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id == ids[30] and not half.is_set():
            half.set()
            assert restarted.wait(60)

    kept = Kept()
    publish(watching, messages(*ids))
    with at_work(make(engine, handle, threads=2, batch_size=4, hooks=[kept])):
        assert half.wait(20)
        port = own_postgres.port
        own_postgres.stop()
        own_postgres._fixed_port = port
        restarted.set()
        wait_until(lambda: len(kept.of(BrokerLost, DatabaseLost)) >= 3)
        own_postgres.start()
        watching.dispose()  # what the test itself has left in its pool is stale
        wait_until(lambda: not waiting(watching))
    assert business.applied() == once(ids)
    assert (business.letters(), business.failing()) == ({}, {})
    for dispose in (engine, watching):
        dispose.dispose()


# --- what is handed back, and what cannot be acked -------------------------------------------------------------------


def receive(queue: PostgresSource) -> Delivery:
    (delivery,) = wait_until(queue.receive)
    return delivery


@pytest.mark.parametrize(("key", "ordered"), [(None, False), ("k", False), ("k", True)])
def test_what_was_begun_and_has_no_outcome_counts_as_delivered_and_what_was_not_begun_does_not(
    engine: Engine, key: str | None, ordered: bool
) -> None:
    queue = PostgresSource(engine, "billing", ordered=ordered)
    publish(engine, messages("a"), key)
    lost = ConnectionError("in the handler")
    counts = []
    for outcome, error in (
        (Outcome.IN_FLIGHT, None),
        (Outcome.IN_FLIGHT, lost),
        (Outcome.IN_FLIGHT, lost),
        (Outcome.FAILED, ValueError("no")),
    ):
        delivery = receive(queue)
        counts.append(delivery.receive_count)
        queue.hand_back([Settlement(delivery, outcome, error)])
    counts.append(receive(queue).receive_count)
    assert counts[:4] == [1, 1, 2, 3]
    assert counts[4] >= 2, "a failure is counted in the row"
    queue.close()


@pytest.mark.parametrize("ordered", [False, True])
def test_a_message_that_could_not_be_deleted_comes_again(
    proxy: TcpProxy, proxied: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    monkeypatch.setattr(source, "ACK_SECONDS", 0.1)
    queue = PostgresSource(proxied, "billing", ordered=ordered)
    publish(engine, messages("a"), "k")
    delivery = receive(queue)
    proxy.lose_next(b"AS gone", reaches_server=False)
    with pytest.raises(BrokerError):
        queue.ack([delivery])
    again = receive(queue)
    assert (again.message.id, queue.ack([again])) == ("a", {again.receipt})
    assert waiting(engine) == []
    queue.close()


@pytest.mark.usefixtures("without_reports")
def test_a_parked_message_whose_deletion_was_lost_is_parked_once_and_holds_no_key(
    proxy: TcpProxy, proxied: Engine, engine: Engine, business: Business, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "ACK_SECONDS", 0.1)

    def fail(session: Session, message: Message) -> None:
        if message.id == "a":
            raise ValueError("no")
        apply(session, message)

    proxy.lose_next(b"AS gone", reaches_server=False)
    publish(engine, messages("a"), "k")
    with at_work(make(proxied, fail, max_attempts=1)):
        wait_until(lambda: proxy.lost)
        publish(engine, messages("b"), "k")
        wait_until(lambda: not waiting(engine))
    assert [letter.message_id for letter in DeadLetters(engine).list()] == ["a"]
    assert business.applied() == once("b")
