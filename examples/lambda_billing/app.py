"""A Lambda function that adds purchases to accounts, each once."""

import json
import os
from typing import Any

import boto3
from sqlalchemy import URL, create_engine, event, text
from sqlalchemy.orm import Session

from txbox import Inbox, Message
from txbox_aws.lambda_ import sqs_handler

ADD_PURCHASE = text(
    "INSERT INTO account (account_id, purchases, cents) VALUES (:account_id, 1, :cents) "
    "ON CONFLICT (account_id) DO UPDATE "
    "SET purchases = account.purchases + 1, cents = account.cents + excluded.cents"
)


def add_purchase(session: Session, message: Message) -> None:
    """Add a purchase to its account; the inbox sees to it that it is added once, and the caller commits."""
    session.execute(ADD_PURCHASE, message.json())


# Made when Lambda loads the module, and kept for all events that this process is given. One event at a time needs one
# connection. hide_parameters: a failed statement's values go into no log and no dead letter.
engine = create_engine(
    URL.create(
        "postgresql+psycopg",
        host=os.environ["DATABASE_HOST"],
        port=int(os.environ.get("DATABASE_PORT", "5432")),
        database=os.environ["DATABASE_NAME"],
    ),
    connect_args={"connect_timeout": 5},
    pool_size=1,
    max_overflow=0,
    hide_parameters=True,
)
secrets = boto3.client("secretsmanager")


@event.listens_for(engine, "do_connect")
def log_in(_dialect: Any, _record: Any, _arguments: Any, options: dict[str, Any]) -> None:
    """Ask for user and password when a connection is made, so that a rotated password is found."""
    answer = secrets.get_secret_value(SecretId=os.environ["DATABASE_SECRET_ARN"])
    secret = json.loads(answer["SecretString"])
    options.update(user=secret["username"], password=secret["password"])


handler = sqs_handler(inbox=Inbox("billing"), engine=engine, handler=add_purchase)
