"""Ledgers for tests, and what tests do to their records behind their backs: time passes when a test says so."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine

from support.waiting import wait_until
from txbox.leases import Lease, Ledger, PostgresLedger
from txbox_testing.conformance.ledger import acquired as acquired


@dataclass(frozen=True)
class Store:
    """A store of leases.

    Attributes:
        name: which.
        ledger: makes the ledger of a subscriber; each is another client of the store.
        expire: lets the lease of a message run out.
        arguments: what a process needs to make the same ledgers.
    """

    name: str
    ledger: Callable[..., Ledger]
    expire: Callable[[str], None]
    arguments: dict[str, str]


def postgres_store(engine: Engine, schema_url: str) -> Store:
    def expire(message_id: str) -> None:
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "UPDATE message_lease SET expires_at = clock_timestamp() - interval '1 ms' "
                "WHERE message_id = %s AND expires_at IS NOT NULL",
                (message_id,),
            )

    return Store(
        "postgres",
        lambda subscriber="mailing": PostgresLedger(subscriber, engine=engine),
        expire,
        {"store": "postgres", "url": schema_url},
    )


def dynamodb_store(client: Any) -> Store:
    from txbox_aws.dynamodb import DynamoDBLedger, create_lease_table

    table = f"lease_{uuid.uuid4().hex[:8]}"
    create_lease_table(table, client=client)

    def expire(message_id: str) -> None:
        found = client.scan(TableName=table, ConsistentRead=True)["Items"]
        for item in found:
            if item["message_id"]["S"] == message_id and "expires_at" in item:
                client.update_item(
                    TableName=table,
                    Key={name: item[name] for name in ("message_id", "subscriber_id")},
                    UpdateExpression="SET expires_at = :past",
                    ExpressionAttributeValues={":past": {"N": "1"}},
                )

    return Store(
        "dynamodb",
        lambda subscriber="mailing": DynamoDBLedger(subscriber, table=table, client=client),
        expire,
        {"store": "dynamodb", "table": table},
    )


def acquired_in_time(ledger: Ledger, message_id: str, lease_seconds: float = 60.0) -> Lease:
    """The lease of a message, when it is free or has run out."""
    return wait_until(lambda: ledger.acquire(message_id, lease_seconds=lease_seconds).lease, f"{message_id} is free")
