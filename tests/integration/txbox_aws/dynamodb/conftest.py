"""A table of leases for each test, and what is in its items."""

from collections.abc import Callable
from typing import Any

import pytest

from support.txbox.leases import Store, dynamodb_store
from txbox_aws.dynamodb.items import plain, typed


@pytest.fixture
def store(dynamodb: Any) -> Store:
    return dynamodb_store(dynamodb)


@pytest.fixture
def table(store: Store) -> str:
    return store.arguments["table"]


@pytest.fixture
def item(dynamodb: Any, table: str) -> Callable[..., dict[str, Any]]:
    """The item of a message, empty if there is none: item("m2"); by default that of m1."""

    def get(message_id: str = "m1") -> dict[str, Any]:
        key = {"message_id": typed(message_id), "subscriber_id": typed("mailing")}
        found = dynamodb.get_item(TableName=table, Key=key, ConsistentRead=True)
        return plain(found.get("Item", {}))

    return get


@pytest.fixture
def put(dynamodb: Any, table: str) -> Callable[..., None]:
    """Change the item of a message behind the ledger's back: put("m1", expires_at=1)."""

    def update(message_id: str, **values: Any) -> None:
        dynamodb.update_item(
            TableName=table,
            Key={"message_id": typed(message_id), "subscriber_id": typed("mailing")},
            UpdateExpression="SET " + ", ".join(f"#{name} = :{name}" for name in values),
            ExpressionAttributeNames={f"#{name}": name for name in values},
            ExpressionAttributeValues={f":{name}": typed(value) for name, value in values.items()},
        )

    return update
