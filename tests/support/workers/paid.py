"""Payments, and effects in SQL that apply them to the business tables, alone or with a message to publish."""

import json
from typing import Any

from support.txbox.outbox import OWN
from support.workers.business import Business
from txbox import Message, Outbox, SqlEffect
from txbox_workers.delivery import Delivery

FIELDS = "account int default 1, amount bigint not null, note text default 'none'"

ADD_UP = """
-- What a message does: its account, and a row of its own.
WITH change AS (SELECT account, sum(amount) AS amount FROM fresh_event GROUP BY account ORDER BY account)
UPDATE account SET balance = balance + change.amount FROM change WHERE account.account_id = change.account;
"""
INSERT = "INSERT INTO effect (message_id, body) SELECT message_id, note FROM fresh_event ORDER BY message_id"
RETURNING = f"{INSERT}\nRETURNING 'k' || length(message_id) AS key, jsonb_build_object('of', message_id) AS body"

EFFECT = SqlEffect.of(ADD_UP + INSERT, fields=FIELDS)


def publishing(script: str = ADD_UP + RETURNING, **more: Any) -> SqlEffect:
    return SqlEffect.of(script, fields=FIELDS, **{"outbox": Outbox(), "destination": OWN, **more})


def paid(id_: str, amount: object = 1, **more: object) -> Message:
    return Message(id_, json.dumps({"amount": amount, **more}).encode())


def delivered(message: Message, *, receive_count: int = 1, group: str | None = None) -> Delivery:
    return Delivery(message, f"{message.id}-{receive_count}", receive_count, group, body=message.body)


SENT = "destination <> 'inbox:billing'"
"""Of rows of the outbox: all but what a worker itself may take from it."""


def published(business: Business) -> list[str]:
    """The ids in the bodies of what is published, in order."""
    found = business.rows(f"SELECT body FROM outbox_message WHERE {SENT} ORDER BY position")
    return [json.loads(bytes(body))["of"] for body in found]
