"""The items in which DynamoDB keeps leases: reading and changing them, and what time their answers tell."""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from txbox.errors import LedgerError
from txbox.leases.lease import elapsed
from txbox.leases.store_clock import StoreClock, http_date
from txbox_aws.clients import DYNAMODB, dynamodb_client, translated
from txbox_aws.dynamodb.values import plain, typed

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient

__all__ = ["Answer", "LeaseItems"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What DynamoDB says.

    Attributes:
        done: whether the condition was met.
        item: as it is now, if that was asked for; or as it was, if the condition was not met; empty if there is none.
        agreed: whether the time in it agrees with what was known.
    """

    done: bool
    item: dict[str, Any]
    agreed: bool


class LeaseItems:
    """The items of one subscriber. May be used by several threads at once.

    Attributes:
        clock: what is known of the store's time.
    """

    def __init__(self, table: str, subscriber_id: str, client: "DynamoDBClient | None") -> None:
        """Name the table; nothing is connected.

        Args:
            table: its name.
            subscriber_id: whose items.
            client: boto3's client of DynamoDB; None makes one with the first call.
        """
        self.clock = StoreClock()
        self._table = table
        self._subscriber_id = subscriber_id
        self._given = client
        self._own: DynamoDBClient | None = None
        self._making = threading.Lock()
        self._process = os.getpid()

    def close(self) -> None:
        """Close the connections of the client that was made here; the next call makes another one."""
        with self._making:
            own, self._own = self._own, None
        if own is not None:
            own.close()

    def get(self, message_id: str) -> dict[str, Any]:
        """Return an item as it is now; empty if there is none. One consistent read."""
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
    ) -> "Answer":
        """Change an item if it meets a condition, in one step.

        Args:
            message_id: of which message.
            change: an UpdateExpression; ``#name`` for each attribute, ``:name`` for each value.
            condition: what the item has to be for it, in the same spelling.
            values: plain ones, by their names.
            asked_at: the reading of ``elapsed`` by which all of it was reckoned.
            returned: what the answer has of an item that was changed: NONE or ALL_NEW.
        """
        expressions = change + condition
        request = {
            "TableName": self._table,
            "Key": self._key(message_id),
            "UpdateExpression": change,
            "ConditionExpression": condition,
            # Every name is an alias: owner and others are reserved words.
            "ExpressionAttributeNames": {f"#{name}": name for name in _ATTRIBUTES if f"#{name}" in expressions},
            "ExpressionAttributeValues": {f":{name}": typed(value) for name, value in values.items()},
            "ReturnValues": returned,
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        }
        return self._call("update_item", request, "Attributes", asked_at)

    def _call(self, method: str, request: dict[str, Any], part: str, asked_at: float | None = None) -> "Answer":
        """Make a call, and learn from its answer what time it is.

        ``asked_at`` is the reading by which the request was made, and not one of when it is sent: so the answer tells
        whether what was reckoned by it was right, even if another thread has learned better in between.
        """
        client: Any = self._client()
        sent = elapsed() if asked_at is None else asked_at
        done = True
        try:
            with translated(DYNAMODB, self._table, _REMEDIES):
                response = getattr(client, method)(**request)
        except client.exceptions.ConditionalCheckFailedException as error:
            response, done, part = error.response, False, "Item"
        date = response["ResponseMetadata"].get("HTTPHeaders", {}).get("date", "")
        try:
            agreed = self.clock.observe(http_date(date), sent=sent, received=elapsed())
        except ValueError as error:
            raise LedgerError(
                f"the answer of DynamoDB has no time in it (its Date header is {date!r}), and leases are reckoned by "
                "it; have whatever is in between pass the header on",
                permanent=True,
            ) from error
        return Answer(done, plain(response.get(part, {})), agreed)

    def _key(self, message_id: str) -> dict[str, Any]:
        return {"message_id": {"S": message_id}, "subscriber_id": {"S": self._subscriber_id}}

    def _client(self) -> "DynamoDBClient":
        if self._given is not None:
            return self._given
        if self._process != os.getpid():  # connections are no good to two processes
            self._process, self._own, self._making = os.getpid(), None, threading.Lock()
        with self._making:
            if self._own is None:
                self._own = dynamodb_client()
            return self._own


_ATTRIBUTES = (
    "fence",
    "attempts",
    "failures",
    "unknown_before",
    "owner",
    "mark",
    "asked_at",
    "expires_at",
    "completed_at",
    "result",
    "fingerprint",
    "remove_at",
)

_REMEDIES = {
    "ResourceNotFound": "; create it with txbox_aws.dynamodb.create_lease_table({table!r}), or correct the table's "
    "name, the region or the account",
    "AccessDenied": "; grant dynamodb:GetItem and dynamodb:UpdateItem on {table}",
    "ValidationException": "; is {table} a table that create_lease_table has made?",
}
