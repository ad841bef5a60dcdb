"""The whole road: outbox, relay, SQS, a worker with an inbox that publishes, relay, SQS, another worker."""

from collections.abc import Callable

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.waiting import wait_until
from support.workers.business import Business, apply
from support.workers.memory_worker import at_work
from txbox import Inbox, Message, Outbox
from txbox.instrumentation import Event, Relayed
from txbox.relay import Relay
from txbox_aws.publishers import AwsPublisher
from txbox_aws.sqs import SqsWorker

OUTBOX = Outbox()


@pytest.mark.parametrize("fifo", [False, True], ids=["standard", "fifo"])
def test_what_is_published_is_billed_once_and_notified_once_though_relays_send_twice(
    engine: Engine, make_queue: Callable[..., str], publishers: dict[str, AwsPublisher], fifo: bool
) -> None:
    purchases, notifications = make_queue(fifo=fifo), make_queue(fifo=fifo)
    business = Business(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE notified (message_id text NOT NULL, body text NOT NULL)")

    def bill(session: Session, message: Message) -> None:
        apply(session, message)
        OUTBOX.publish(session, notifications, b"\0billed " + message.body, key="a", message_id=f"n-{message.id}")

    def notify(session: Session, message: Message) -> None:
        session.connection().exec_driver_sql(
            "INSERT INTO notified VALUES (%s, %s)", (message.id, message.body.removeprefix(b"\0").decode())
        )

    cuts: list[int] = []

    def cut(event: Event) -> None:
        """Have a batch sent again that is settled already: the same as a settlement that was lost."""
        if isinstance(event, Relayed) and event.source == purchases and event.sent and not cuts:
            cuts.append(event.sent)
            with engine.begin() as connection:
                connection.exec_driver_sql(
                    "INSERT INTO outbox_message (lane, message_id, destination, key, headers, body) "
                    "SELECT 1, 'p-' || number, %s, 'a', '{}', number::text::bytea FROM generate_series(0, 4) AS number",
                    (purchases,),
                )

    relay = Relay(engine, publishers, hooks=[cut])
    billing = SqsWorker(purchases, inbox=Inbox("billing"), engine=engine, handler=bill, wait_seconds=1)
    notifying = SqsWorker(notifications, inbox=Inbox("notifying"), engine=engine, handler=notify, wait_seconds=1)
    with at_work(relay, billing, notifying):
        for number in range(20):
            with engine.begin() as connection:
                OUTBOX.publish(connection, purchases, str(number), key="a", message_id=f"p-{number}")
        wait_until(lambda: cuts, "the second sends")

        notified = "SELECT message_id FROM notified"
        wait_until(lambda: len(list(business.rows(notified))) >= 20, "twenty notifications", timeout=60)
        wait_until(lambda: relay.sent >= 45, "all sends", timeout=60)
        wait_until(
            lambda: sum(billing.counts.values()) >= (20 if fifo else 25), "the second deliveries too", timeout=60
        )
    assert business.applied() == {f"p-{number}": 1 for number in range(20)}
    assert sorted(business.rows(notified)) == sorted(f"n-p-{number}" for number in range(20))
    assert sorted(business.rows("SELECT body FROM notified")) == sorted(f"billed {number}" for number in range(20))
    if fifo:
        assert business.order() == [f"p-{number}" for number in range(20)]
