"""What shop and billing do: all of it is in the transaction that they are lent."""

import json

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from txbox import Message
from txbox.outbox import Outbox
from txbox_demo.billing import Billing, read_accounts
from txbox_demo.purchases import Account, Purchase
from txbox_demo.shop import place_order, read_orders

QUEUE = "https://sqs.eu-central-1.amazonaws.com/123456789012/notifications"
PURCHASE = Purchase("cdnow-00001", "00001", "19970101", 2, 1177)
MESSAGE = Message(PURCHASE.event_id, PURCHASE.as_json().encode())


def outbox(engine: Engine) -> list[tuple[str, str, str]]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT message_id, key, convert_from(body, 'UTF8') FROM outbox_message"))
        return [(message_id, key, body) for message_id, key, body in rows]


def test_a_purchase_is_added_to_its_account_and_the_customer_is_to_be_told(services: Engine) -> None:
    for _ in range(2):
        with Session(services) as session, session.begin():
            Billing(Outbox(), QUEUE)(session, MESSAGE)
    with services.connect() as connection:
        assert read_accounts(connection) == {"00001": Account(2, 4, 2354)}
    (first, key, body), (second, *_) = outbox(services)
    assert key == "00001"
    assert json.loads(body) == {"purchase_id": "cdnow-00001", "customer_id": "00001", "cents": 1177}
    # Handled twice it would be told twice, and the demo would see it.
    assert len({first, second, PURCHASE.event_id}) == 3


def test_without_a_queue_nobody_is_told(services: Engine) -> None:
    with Session(services) as session, session.begin():
        Billing(Outbox(), "")(session, MESSAGE)
    assert outbox(services) == []


@pytest.mark.parametrize("service", ["shop", "billing"])
def test_a_rollback_takes_everything_back(service: str, services: Engine) -> None:
    with Session(services) as session:
        if service == "shop":
            place_order(session, Outbox(), QUEUE, PURCHASE)
        else:
            Billing(Outbox(), QUEUE)(session, MESSAGE)
        session.rollback()
    assert outbox(services) == []
    with services.connect() as connection:
        assert (read_orders(connection), read_accounts(connection)) == ({}, {})
