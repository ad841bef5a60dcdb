"""Read and change the items in which DynamoDB keeps leases. Each response also tells the store's time."""

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from boto3.dynamodb.types import Binary, TypeDeserializer, TypeSerializer

from txbox.leases.lease import elapsed
from txbox_aws.clients import DYNAMODB, dynamodb_client, translated
from txbox_aws.dynamodb.store_clock import StoreClock, response_time


def typed(value: Any) -> Any:
    """Return a Python value as DynamoDB's client takes it, such as ``{"N": "1"}``.

    Args:
        value: None, a bool, int, Decimal, str, bytes, or a list, dict or set of these; no float, which is not exact.

    Raises:
        TypeError: DynamoDB cannot keep such a value.
    """
    if type(value) is str:  # boto3 takes ten times as long, for each of a lease's ten values
        return {"S": value}
    if type(value) is int and abs(value) < _EXACT:
        return {"N": str(value)}
    return _to_dynamodb.serialize(value)


def plain(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of DynamoDB's client as Python values: whole numbers become int, others Decimal."""
    return {name: _plain(value) for name, value in item.items()}


def _plain(value: Any) -> Any:
    if (text := value.get("S")) is not None:
        return text
    if (text := value.get("N")) is not None and text.isdecimal():
        return int(text)
    return _simple(_from_dynamodb.deserialize(value))


def _simple(value: Any) -> Any:
    """Replace boto3's types for numbers and bytes, also in lists, sets and maps."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else value
    if isinstance(value, Binary):
        return value.value  # type: ignore[attr-defined]  # the stubs do not list it
    if isinstance(value, list | set):
        return type(value)(_simple(part) for part in value)
    if isinstance(value, dict):
        return {name: _simple(part) for name, part in value.items()}
    return value


_EXACT = 10**38
"""What DynamoDB keeps exactly: 38 digits."""

_to_dynamodb = TypeSerializer()
_from_dynamodb = TypeDeserializer()


if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient


@dataclass(frozen=True, slots=True)
class ItemResponse:
    """DynamoDB's response about one item."""

    accepted: bool  # whether the condition was met
    item: dict[str, Any]
    """The item as it is now, if that was requested; as it was, if the condition was not met; empty if there is none."""
    clock_agreed: bool  # whether its time agrees with earlier responses


class LeaseItems:
    """The items of one subscriber. Several threads may use it at once."""

    def __init__(self, table: str, subscriber_id: str, client: "DynamoDBClient | None") -> None:
        """Name the table without connecting. If no client is given, the first call makes one."""
        self.clock = StoreClock()
        self._table = table
        self._subscriber_id = subscriber_id
        self._given_client = client
        self._own_client: DynamoDBClient | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()

    def close(self) -> None:
        """Close the connections of a client that was made here. The next call makes another one."""
        with self._lock:
            own, self._own_client = self._own_client, None
        if own is not None:
            own.close()

    def get(self, message_id: str) -> dict[str, Any]:
        """Return an item as it is now, by one consistent read; empty if there is none."""
        request = {"TableName": self._table, "Key": self._key(message_id), "ConsistentRead": True}
        return self._call("get_item", request, "Item").item

    def update(
        self,
        message_id: str,
        change: str,
        condition: str,
        values: Mapping[str, Any],
        asked_at: float,
        *,
        returned: str = "NONE",
    ) -> ItemResponse:
        """Change an item if it meets a condition, in one step.

        Args:
            message_id: the item's message.
            change, condition: expressions of DynamoDB; ``#name`` for each attribute, ``:name`` for each value.
            values: plain values, by name.
            asked_at: the reading of ``elapsed`` from which the values were computed.
            returned: what the response has of an item that was changed: NONE or ALL_NEW.
        """
        request = {
            "TableName": self._table,
            "Key": self._key(message_id),
            **_expressions(change, condition),
            "ExpressionAttributeValues": {f":{name}": typed(value) for name, value in values.items()},
            "ReturnValues": returned,
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        }
        return self._call("update_item", request, "Attributes", asked_at)

    def _call(self, method: str, request: dict[str, Any], part: str, asked_at: float | None = None) -> ItemResponse:
        client: Any = self._client()
        # Count from asked_at, not from the sending: then the response shows whether the values computed from it were
        # right, even if another thread has found better bounds in between.
        sent = elapsed() if asked_at is None else asked_at
        accepted = True
        try:
            with translated(DYNAMODB, self._table, _REMEDIES):
                response = getattr(client, method)(**request)
        except client.exceptions.ConditionalCheckFailedException as error:
            response, accepted, part = error.response, False, "Item"
        agreed = self.clock.observe(response_time(response), sent=sent, received=elapsed())
        return ItemResponse(accepted, plain(response.get(part, {})), agreed)

    def _key(self, message_id: str) -> dict[str, Any]:
        return {"message_id": {"S": message_id}, "subscriber_id": {"S": self._subscriber_id}}

    def _client(self) -> "DynamoDBClient":
        if self._given_client is not None:
            return self._given_client
        if self._process != os.getpid():  # two processes cannot share connections
            self._process, self._own_client, self._lock = os.getpid(), None, threading.Lock()
        with self._lock:
            if self._own_client is None:
                # The requests are made here, of text and numbers: checking them takes a seventh of a call's time.
                self._own_client = dynamodb_client(checks_parameters=False)
            return self._own_client


_ALIAS = re.compile(r"#(\w+)")
_RESERVED = {"owner", "result"}
"""Of our attributes' names, those that are words of DynamoDB."""


@lru_cache(maxsize=64)  # there are a dozen
def _expressions(change: str, condition: str) -> dict[str, Any]:
    """Return a request's expressions, which keep the aliases of reserved words alone: each costs the client time."""
    names = _RESERVED.intersection(_ALIAS.findall(change + condition))
    change, condition = (
        _ALIAS.sub(lambda found: found[0] if found[1] in _RESERVED else found[1], text) for text in (change, condition)
    )
    aliases = {"ExpressionAttributeNames": {f"#{name}": name for name in names}} if names else {}
    return {"UpdateExpression": change, "ConditionExpression": condition, **aliases}


_REMEDIES = {
    "ResourceNotFound": "; create it with txbox_aws.dynamodb.create_lease_table({table!r}), or correct the table's "
    "name, the region or the account",
    "AccessDenied": "; grant dynamodb:GetItem and dynamodb:UpdateItem on {table}",
    "ValidationException": "; is {table} a table that create_lease_table has made?",
}
