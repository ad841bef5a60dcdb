"""How an idle relay learns of a message at once, without a NOTIFY in the business transaction."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, event
from sqlalchemy.orm import Session

from integration.txbox.conftest import StartRelay
from support.postgres.statements import run
from support.txbox.outbox import OWN
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from txbox import Outbox
from txbox.outbox.notifier import CHANNEL
from txbox.relay import poller


@pytest.fixture
def sleepy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relays that poll once in an hour, and never stay awake."""
    monkeypatch.setattr(poller, "IDLE_SECONDS", 3_600.0)
    monkeypatch.setattr(poller, "AWAKE_SECONDS", 0.0)


@contextmanager
def listening(engine: Engine) -> Iterator[Callable[[int], None]]:
    """Listen; yield a function that sees that there were so many notifications since it was called last."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        driver: Any = connection.connection.driver_connection
        connection.detach()
        connection.exec_driver_sql(f"LISTEN {CHANNEL}")

        def were(expected: int) -> None:
            heard = list(driver.notifies(timeout=60, stop_after=expected)) if expected else []
            assert len([*heard, *driver.notifies(timeout=0.2)]) == expected

        yield were


@pytest.mark.usefixtures("sleepy")
@pytest.mark.parametrize("how", ["connection", "session"])
def test_a_published_message_wakes_an_idle_relay(engine: Engine, start_relay: StartRelay, how: str) -> None:
    broker = RecordingPublisher()
    relay = start_relay(broker)
    wait_until(lambda: is_listening(engine), "it listens")
    if how == "connection":
        with engine.begin() as connection:
            Outbox().publish(connection, OWN, "one")
    else:
        with Session(engine) as session, session.begin():
            Outbox().publish(session, OWN, "one")
    broker.wait_for(1)
    assert relay.running


def is_listening(engine: Engine) -> bool:
    query = (
        "SELECT count(*) FROM pg_stat_activity "
        f"WHERE query = 'LISTEN {CHANNEL}' AND state = 'idle' AND datname = current_database()"
    )
    with engine.connect() as connection:
        return bool(connection.exec_driver_sql(query).scalar_one())


def test_relays_are_notified_after_the_business_transaction_and_not_in_it(engine: Engine) -> None:
    with listening(engine) as notifications:
        with engine.connect() as connection:
            Outbox().publish(connection, OWN, "one")
            connection.commit()
            notifications(0)
        notifications(1)


def test_many_transactions_notify_a_few_times(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txbox.outbox.notifier.NOTIFY_SECONDS", 3_600.0)
    own = create_engine(engine.url)
    with listening(engine) as notifications:
        for _ in range(20):
            with own.begin() as connection:
                Outbox().publish(connection, OWN, "one")
        notifications(1)
        with engine.begin() as connection:  # another pool notifies by itself
            Outbox().publish(connection, OWN, "one")
        notifications(1)
    own.dispose()


def test_a_transaction_that_did_not_publish_or_does_not_want_to_does_not_notify(engine: Engine) -> None:
    with listening(engine) as notifications:
        with engine.begin() as connection:
            Outbox(notify=False).publish(connection, OWN, "one")
        run(engine, "SELECT 1")
        notifications(0)
        with engine.begin() as connection:
            Outbox().publish(connection, OWN, "one")
        notifications(1)
        run(engine, "SELECT 1")
        notifications(0)


def test_an_engine_without_a_pool_notifies_too(schema_url: str, engine: Engine) -> None:
    own = create_engine(schema_url, poolclass=NullPool)
    with listening(engine) as notifications:
        with own.begin() as connection:
            Outbox().publish(connection, OWN, "one")
        notifications(1)
    own.dispose()


def test_a_notify_that_fails_has_its_connection_replaced(engine: Engine) -> None:
    own = create_engine(engine.url, pool_size=1, max_overflow=0)
    with own.connect() as connection:
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        Outbox().publish(connection, OWN, "one")
        connection.commit()
        with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as other:
            other.exec_driver_sql("SELECT pg_terminate_backend(%s, 5000)", (pid,))
    with own.connect() as connection:
        assert connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one() != pid
    own.dispose()


def test_a_relay_that_must_not_listen_finds_messages_by_itself(engine: Engine, start_relay: StartRelay) -> None:
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *call: statements.append(call[2]))
    broker = RecordingPublisher()
    start_relay(broker, listen=False)
    wait_until(lambda: any("outbox_relay" in statement for statement in statements), "its first report")
    with engine.begin() as connection:
        Outbox(notify=False).publish(connection, OWN, "one")
    broker.wait_for(1)
    assert [statement for statement in statements if "LISTEN" in statement or "NOTIFY" in statement] == []
