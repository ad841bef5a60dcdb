"""The worker that bills what comes through the queue, live."""

import os

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from txbox import Inbox, Message
from txbox_aws.sqs import SqsWorker

engine = create_engine(os.environ["TXBOX_DATABASE_URL"])

with engine.begin() as connection:
    connection.execute(text("CREATE TABLE IF NOT EXISTS account (customer_id text PRIMARY KEY, cents bigint NOT NULL)"))


def bill(session: Session, message: Message) -> None:
    """Add one purchase to its account."""
    session.execute(
        text(
            "INSERT INTO account VALUES (:customer_id, :cents) "
            "ON CONFLICT (customer_id) DO UPDATE SET cents = account.cents + excluded.cents"
        ),
        message.json(),
    )


worker = SqsWorker(os.environ["QUEUE_URL"], inbox=Inbox("billing"), engine=engine, handler=bill, wait_seconds=1)
