"""Rows that have moved since they were read, and settlements that fail: nothing stays in the outbox, or in hand."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest
from sqlalchemy import Engine

from support.txbox.outbox import publish
from support.waiting import wait_until
from txbox import BrokerError, Outcome, Outgoing
from txbox.postgres.round_trip import run_steps
from txbox.postgres.transactions import driver_cursor
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.postgres import PostgresSource


@pytest.fixture
def source(engine: Engine) -> Iterator[PostgresSource]:
    source = PostgresSource(engine, "billing", ordered=True)
    source.open()
    yield source
    source.close()


def received(source: PostgresSource) -> Sequence[Delivery]:
    found: list[Delivery] = []

    def receive() -> bool:
        found.extend(source.receive())
        return bool(found)

    wait_until(receive, "a delivery")
    return found


def settle(engine: Engine, source: PostgresSource, deliveries: Sequence[Delivery]) -> None:
    """Settle as the transaction of a handler does."""
    with engine.begin() as connection, driver_cursor(connection):
        run_steps(connection, list(source.settling(deliveries)))
    source.settled(deliveries)
    source.ack(deliveries)


def waiting(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM outbox_message").scalar_one())


@pytest.mark.parametrize("fails", [False, True], ids=["fresh", "held"])
def test_a_message_whose_row_has_moved_comes_again(engine: Engine, source: PostgresSource, fails: bool) -> None:
    publish(engine, Outgoing("inbox:billing", "1", key="ann"))
    deliveries = received(source)
    if fails:
        source.hand_back([Settlement(deliveries[0], Outcome.FAILED, ValueError("no"))])
        deliveries = received(source)
    with engine.begin() as connection:  # "retry now" does so, and VACUUM FULL, and another process that postpones it
        connection.exec_driver_sql("UPDATE outbox_message SET held = true, due_at = clock_timestamp()")
    settle(engine, source, deliveries)
    assert waiting(engine) == 1
    again = received(source)
    assert [one.message.id for one in again] == [one.message.id for one in deliveries]
    settle(engine, source, again)
    assert waiting(engine) == 0


def test_a_message_that_cannot_be_deleted_once_it_is_parked_comes_again(engine: Engine, source: PostgresSource) -> None:
    publish(engine, Outgoing("inbox:billing", "1", key="ann"), Outgoing("inbox:billing", "2", key="ann"))
    first, second = received(source)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE RULE keep AS ON DELETE TO outbox_message DO INSTEAD SELECT 1 / 0")
    with suppress(BrokerError):
        source.ack([first])
        pytest.fail("the rule refuses it")
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP RULE keep ON outbox_message")
    source.hand_back([Settlement(second, Outcome.IN_FLIGHT)])
    again = received(source)
    assert [one.message.id for one in again] == [first.message.id, second.message.id]
    source.ack(again)
    assert waiting(engine) == 0
