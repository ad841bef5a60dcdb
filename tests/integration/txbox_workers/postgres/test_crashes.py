"""Crashes of the server under a worker that takes its messages from the outbox: what was committed is applied once."""

import os
import shutil
import signal
import threading
import time
from collections import Counter

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from support.postgres.crashes import crashing_server, kill_a_backend, standby_of, stop_immediately
from support.waiting import wait_until
from support.workers.business import Business, apply
from txbox import Inbox, Message, Outbox
from txbox.backoff import Backoff
from txbox.outbox import Outgoing
from txbox.schema import tables
from txbox_workers.postgres import PostgresWorker

pytestmark = pytest.mark.chaos

CRASHES = 6
KEYS = 5


def test_what_was_committed_before_a_crash_is_applied_once_and_in_order() -> None:
    with crashing_server() as server:
        engine, watching = create_engine(server.url), create_engine(server.url, pool_pre_ping=True)
        with engine.begin() as connection:
            tables().metadata.create_all(connection)
        business = Business(watching)
        stopping, committed, uncertain = threading.Event(), [], []

        def produce() -> None:
            number = 0
            while not stopping.is_set():
                ids = [f"{number + key:06}" for key in range(KEYS)]
                number += KEYS
                try:
                    with watching.begin() as connection:
                        messages = [Outgoing("inbox:billing", b"{}", key=id_[-1], message_id=id_) for id_ in ids]
                        Outbox().publish_many(connection, messages)
                    committed.extend(ids)
                except DBAPIError:
                    uncertain.extend(ids)
                time.sleep(0.005)  # as a service does that has other work

        worker = PostgresWorker(
            inbox=Inbox("billing"), engine=engine, handler=apply, threads=3, ordered=True, backoff=Backoff(0.1, 0.1)
        )
        worker.start()
        producer = threading.Thread(target=produce)
        producer.start()
        for crash in range(CRASHES):
            before = len(committed)
            wait_until(lambda before=before: len(committed) >= before + 100)
            if crash % 2:
                stop_immediately(server, 0)
            else:
                with watching.connect() as connection:
                    backend = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
                kill_a_backend(server, backend)
        before = len(committed)
        wait_until(lambda: len(committed) >= before + 100)
        stopping.set()
        producer.join()
        wait_until(lambda: not business.rows("SELECT position FROM outbox_message"), "all are settled", timeout=120)
        assert worker.stop()
        applied = business.order()
        assert business.letters() == {}
        for dispose in (engine, watching):
            dispose.dispose()
    assert set(Counter(applied).values()) == {1}
    assert set(committed) <= set(applied) <= {*committed, *uncertain}
    for key in range(10):
        of_key = [id_ for id_ in applied if id_[-1] == str(key)]
        assert of_key == sorted(of_key)


def test_a_standby_that_lagged_takes_over_and_each_message_that_it_knows_is_applied_once() -> None:
    """It gives out positions again that the worker remembers, for other messages, and has some back that were done."""
    with crashing_server() as server:
        engine = create_engine(server.url)
        with engine.begin() as connection:
            tables().metadata.create_all(connection)
        business = Business(engine)

        def publish(name: str, count: int) -> list[str]:
            ids = [f"{name}{number:04}" for number in range(count)]
            with engine.begin() as connection:
                messages = [Outgoing("inbox:billing", b"{}", key=id_[-1], message_id=id_) for id_ in ids]
                Outbox().publish_many(connection, messages)
            return ids

        held = threading.Event()

        def handler(session: Session, message: Message) -> None:
            if message.id in ("b0007", "d0003"):
                held.wait(60)
            apply(session, message)

        backoff = Backoff(0.1, 0.1)
        worker = PostgresWorker(
            inbox=Inbox("billing"), engine=engine, handler=handler, threads=4, ordered=True, backoff=backoff
        )
        worker.start()
        known = publish("a", 50)
        wait_until(lambda: len(business.order()) == 50)
        known += publish("b", 50)
        wait_until(lambda: len(business.order()) >= 95, "what waits behind b0007 in its key is left")
        standby = standby_of(server)
        publish("c", 60)  # never heard of again
        held.set()
        wait_until(lambda: len(business.order()) == 160)
        held.clear()
        publish("d", 20)
        port = server.port
        os.kill(server.pid, signal.SIGQUIT)
        server.stop()
        with standby() as promoted:
            promoted.stop()
            promoted._fixed_port = port
            promoted.start()
            engine.dispose()
            known += publish("e", 200)
            held.set()
            wait_until(lambda: not business.rows("SELECT position FROM outbox_message"), timeout=60)
            assert worker.stop()
            applied = business.order()
            assert business.letters() == {}
            engine.dispose()
        shutil.rmtree(promoted.directory, ignore_errors=True)
    assert Counter(applied) == Counter(known)
    for key in range(10):
        of_key = [id_ for id_ in applied if id_[-1] == str(key)]
        assert of_key == sorted(of_key)
