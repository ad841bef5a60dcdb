"""Rows that have moved since they were read, and settlements that fail: nothing stays in the outbox, or in hand."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.txbox.outbox import publish
from support.waiting import wait_until
from support.workers.business import Business, apply
from txbox import BrokerError, Inbox, Message, Outcome, Outgoing, SqlEffect
from txbox.postgres.round_trip import run_steps
from txbox.postgres.transactions import driver_cursor
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.postgres import PostgresSource, PostgresWorker


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


def settle(engine: Engine, source: PostgresSource, deliveries: Sequence[Delivery]) -> bool:
    """Settle as the transaction of a handler does; return whether all were where they had been read."""
    with engine.connect() as connection, connection.begin() as transaction, driver_cursor(connection):
        changed = run_steps(connection, source.settling(deliveries))[-1].command_tuples
        if changed < len(deliveries):
            transaction.rollback()
    if changed < len(deliveries):
        source.hand_back([Settlement(one, Outcome.IN_FLIGHT) for one in deliveries])
        return False
    source.settled(deliveries)
    source.ack(deliveries)
    return True


def waiting(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM outbox_message").scalar_one())


def _batch(session: Session, messages: Sequence[Message]) -> None:
    for message in messages:
        apply(session, message)


APPLY_SET = "INSERT INTO effect (message_id, body) SELECT message_id, n FROM fresh_event"
WAYS: dict[str, dict[str, Any]] = {
    "handler": {"handler": apply, "batch_size": 1, "ordered": True},
    "handlers of a batch": {"handler": apply, "batch_size": 2},
    "batch handler": {"batch_handler": _batch, "batch_size": 2},
    "effect": {"effect": SqlEffect.of(APPLY_SET, fields="n text"), "batch_size": 2, "ordered": True},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("DELETE FROM outbox_message WHERE message_id = 'm2'", ["m0", "m1", "m3"]),
        (
            "UPDATE outbox_message SET message_id = 'n2', body = '{\"n\": \"2\"}' WHERE message_id = 'm2'",
            ["m0", "m1", "m3", "n2"],
        ),
        ("UPDATE outbox_message SET headers = headers WHERE message_id = 'm2'", ["m0", "m1", "m2", "m3"]),
    ],
    ids=["taken back", "another in its place", "moved"],
)
def test_what_is_not_where_it_was_read_is_not_applied_but_read_again(
    engine: Engine, options: dict[str, Any], change: str, left: list[str]
) -> None:
    """It was read ahead; somebody changes its row before it is begun."""
    business = Business(engine)
    worker = PostgresWorker(inbox=Inbox("billing"), engine=engine, threads=1, **options)
    worker.start()
    with engine.connect() as blocking:
        blocking.exec_driver_sql("LOCK TABLE effect IN SHARE MODE")
        publish(engine, *(Outgoing("inbox:billing", '{"n": "1"}', key=f"k{n}", message_id=f"m{n}") for n in range(4)))
        wait_until(lambda: business.rows("SELECT 1 FROM pg_locks WHERE NOT granted"), "the first is being applied")
        with engine.begin() as connection:
            assert connection.exec_driver_sql(change).rowcount == 1
        blocking.rollback()
    wait_until(lambda: waiting(engine) == 0, "all are settled")
    assert worker.stop()
    assert sorted(business.order()) == left
    assert business.recorded() == set(left)
    assert business.failing() == business.letters() == {}


@pytest.mark.parametrize("fails", [False, True], ids=["fresh", "held"])
def test_a_message_whose_row_has_moved_comes_again(engine: Engine, source: PostgresSource, fails: bool) -> None:
    publish(engine, Outgoing("inbox:billing", "1", key="ann"))
    deliveries = received(source)
    if fails:
        source.hand_back([Settlement(deliveries[0], Outcome.FAILED, ValueError("no"))])
        deliveries = received(source)
    with engine.begin() as connection:  # "retry now" does so, and VACUUM FULL, and another process that postpones it
        connection.exec_driver_sql("UPDATE outbox_message SET held = true, due_at = clock_timestamp()")
    assert not settle(engine, source, deliveries)
    assert waiting(engine) == 1
    again = received(source)
    assert [one.message.id for one in again] == [one.message.id for one in deliveries]
    assert settle(engine, source, again)
    assert waiting(engine) == 0


def test_rows_that_cannot_be_deleted_are_not_applied_and_people_are_told(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    business = Business(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE RULE keep AS ON DELETE TO outbox_message DO INSTEAD NOTHING")
    worker = PostgresWorker(inbox=Inbox("billing"), engine=engine, handler=apply, max_attempts=2)
    worker.start()
    (message_id,) = publish(engine, Outgoing("inbox:billing", "1"))
    wait_until(lambda: "a trigger, a rule or a policy" in caplog.text)
    assert business.order() == []
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP RULE keep ON outbox_message")
    wait_until(lambda: waiting(engine) == 0)
    assert worker.stop()
    assert business.order() == [message_id]
    assert business.failing() == business.letters() == {}


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
