"""How the leases in a table of DynamoDB stand."""

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from txbox.leases.status import LeaseStatus, LedgerStatus
from txbox_aws.clients import DYNAMODB, dynamodb_client, translated
from txbox_aws.dynamodb.store_clock import response_time
from txbox_aws.dynamodb.table import TABLE
from txbox_aws.dynamodb.values import plain

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient

EXACT_UP_TO_ITEMS = 100_000
"""Counting reads every item: as many as these cost some cents, and take seconds."""


def read_lease_table(
    table: str = TABLE, *, client: "DynamoDBClient | None" = None, exact_up_to_rows: float = EXACT_UP_TO_ITEMS
) -> LeaseStatus:
    """Read how leases stand. Items do not say when an attempt began: ``longest_seconds`` is None.

    Args:
        table: the table's name.
        client: boto3's client of DynamoDB; by default one is made.
        exact_up_to_rows: count, which reads every item, only a table that has no more of them by DynamoDB's own figure,
            which is up to six hours old, and stop there.

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
