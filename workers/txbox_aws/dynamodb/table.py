"""Create and check the table of a ledger in DynamoDB, and read the status of its leases."""

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from txbox.errors import LedgerError
from txbox.leases.status import LeaseStatus, LedgerStatus
from txbox_aws.clients import DYNAMODB, dynamodb_client, translated
from txbox_aws.dynamodb.items import plain
from txbox_aws.dynamodb.store_clock import response_time

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient
    from types_boto3_dynamodb.type_defs import KeySchemaElementTypeDef

TABLE = "message_lease"

REMOVED_BY = "remove_at"
"""The attribute that says when DynamoDB is to remove an item."""


def create_lease_table(table: str = TABLE, *, client: "DynamoDBClient | None" = None) -> None:
    """Create a ledger's table, billed per request, with DynamoDB's removal of old items switched on, and wait for it.

    A table that exists is left as it is, except for the removal. You may also make the table in any other way: hash key
    ``message_id`` and range key ``subscriber_id``, both strings, and ``remove_at`` as its TTL attribute.

    Args:
        table: its name.
        client: boto3's client of DynamoDB; by default one is made.

    Raises:
        LedgerError: there is a table of that name with other keys or another TTL; or DynamoDB refuses.
    """
    if client is None:
        with contextlib.closing(dynamodb_client()) as own:
            create_lease_table(table, client=own)
        return
    with translated(DYNAMODB, table, _REMEDIES):
        with contextlib.suppress(client.exceptions.ResourceInUseException):  # it exists: checked below
            client.create_table(
                TableName=table,
                KeySchema=_KEYS,
                AttributeDefinitions=[{"AttributeName": key["AttributeName"], "AttributeType": "S"} for key in _KEYS],
                BillingMode="PAY_PER_REQUEST",
            )
        client.get_waiter("table_exists").wait(TableName=table, WaiterConfig={"Delay": 1, "MaxAttempts": 120})
        _check_keys(table, client)
        if not _is_removal_on(table, client):
            try:
                client.update_time_to_live(
                    TableName=table, TimeToLiveSpecification={"Enabled": True, "AttributeName": REMOVED_BY}
                )
            except client.exceptions.ClientError:
                if not _is_removal_on(table, client):  # otherwise another process that makes the same table was faster
                    raise


def _check_keys(table: str, client: "DynamoDBClient") -> None:
    description = client.describe_table(TableName=table)["Table"]
    types = {each["AttributeName"]: each["AttributeType"] for each in description["AttributeDefinitions"]}
    keys = [(key["AttributeName"], key["KeyType"], types[key["AttributeName"]]) for key in description["KeySchema"]]
    if keys != [(key["AttributeName"], key["KeyType"], "S") for key in _KEYS]:
        found = ", ".join(f"{name} ({kind}, {of})" for name, kind, of in keys)
        raise LedgerError(
            f"the table {table} exists with other keys: {found}; a ledger needs message_id (HASH, S), "
            "subscriber_id (RANGE, S): choose another name for it",
            permanent=True,
        )


def _is_removal_on(table: str, client: "DynamoDBClient") -> bool:
    ttl = client.describe_time_to_live(TableName=table).get("TimeToLiveDescription", {})
    if ttl.get("TimeToLiveStatus") not in ("ENABLED", "ENABLING"):
        return False
    if (attribute := ttl.get("AttributeName")) != REMOVED_BY:
        raise LedgerError(
            f"the table {table} removes items by {attribute}; a ledger needs {REMOVED_BY}: switch the other off, "
            "or choose another name for the table",
            permanent=True,
        )
    return True


_KEYS: "list[KeySchemaElementTypeDef]" = [
    {"AttributeName": "message_id", "KeyType": "HASH"},  # first: spreads a subscriber's load over all partitions
    {"AttributeName": "subscriber_id", "KeyType": "RANGE"},
]

_REMEDIES = {
    "AccessDenied": "; grant dynamodb:CreateTable, dynamodb:DescribeTable, dynamodb:DescribeTimeToLive and "
    "dynamodb:UpdateTimeToLive on {table}",
}


EXACT_UP_TO_ITEMS = 100_000
"""Counting reads every item: this many cost some cents and take seconds."""


def read_lease_table(
    table: str = TABLE, *, client: "DynamoDBClient | None" = None, exact_up_to_rows: float = EXACT_UP_TO_ITEMS
) -> LeaseStatus:
    """Return the status of the leases. ``longest_seconds`` is None: items do not say when an attempt began.

    Args:
        table: the table's name.
        client: boto3's client of DynamoDB; by default one is made.
        exact_up_to_rows: count, which reads every item, only if DynamoDB's own figure, up to six hours old, is not
            higher than this; stop counting at this number.

    Raises:
        LedgerError: DynamoDB cannot be asked, or there is no such table.
    """
    if client is None:
        with contextlib.closing(dynamodb_client()) as own:
            return read_lease_table(table, client=own, exact_up_to_rows=exact_up_to_rows)
    with translated(DYNAMODB, table):
        estimated = client.describe_table(TableName=table)["Table"].get("ItemCount", 0)
    if estimated > exact_up_to_rows:
        return LeaseStatus(estimated, exact=False)
    counts: dict[str, Counter[str]] = {}
    request: dict[str, Any] = {"TableName": table, "ProjectionExpression": "subscriber_id, expires_at, completed_at"}
    rows = 0
    while True:
        with translated(DYNAMODB, table):
            page = client.scan(**request)
        now = response_time(page) * 1000
        for item in map(plain, page["Items"]):
            rows += 1
            counts.setdefault(item["subscriber_id"], Counter())[_state(item, now)] += 1
        if "LastEvaluatedKey" not in page:
            break
        if rows > exact_up_to_rows:
            return LeaseStatus(rows, exact=False)
        request["ExclusiveStartKey"] = page["LastEvaluatedKey"]
    return LeaseStatus(rows, ledgers=tuple(LedgerStatus(name, **counts[name]) for name in sorted(counts)))


def _state(item: dict[str, Any], now: float) -> str:
    if "completed_at" in item:
        return "completed"
    if "expires_at" not in item:
        return "failed"
    return "in_flight" if item["expires_at"] > now else "run_out"
