"""Keep message ids in DynamoDB's items, like ``txbox.entities`` in tables. Needs the extra ``aws``.

One UpdateItem changes the item and its ids under a condition. DynamoDB evaluates and applies it atomically.

``update_once``
    adds the message's id to a set in the item. **The set grows**: an item holds 400 KB, about 10,000 ids of 36
    characters, and an update is charged by the size of the whole item. It suits items that few messages change: an
    order, a payment, a booking. Delete finished items (or let DynamoDB's TTL do it); take an id out of the set
    (``DELETE processed_message_ids :ids``) once its message cannot come again; or use ``update_if_newer``, or a ledger
    (``txbox.leases``), whose ids expire by themselves.

``update_if_newer``
    keeps one number or text per source, the highest so far. It never grows and never forgets, but **drops what comes
    late**, after an event with a higher id.

When two clients, A and B, apply the same message to one item::

    A: UpdateItem ── applied ──                A: True
    B: UpdateItem ──────────── the condition   B: False
                               is not met

The answer may be lost after the update was applied. boto3 then repeats the call itself, the repeated call finds the id,
and False is returned: the effect is there, once, but no call has returned True. So do not do further work for a message
only "if True"; do it for False too, protected in its own way.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from txbox.entities.event_ids import EventId, check_kind, valid_event_id, valid_source
from txbox.errors import EntityMissing, InvalidConfiguration
from txbox.messages.message import valid_message_id
from txbox_aws.clients import DYNAMODB, translated
from txbox_aws.dynamodb.items import plain, typed

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient

__all__ = ["HIGHEST", "IDS", "update_if_newer", "update_once"]

IDS = "processed_message_ids"
"""The attribute that holds the ids of messages."""

HIGHEST = "highest_event_id"
"""The prefix of the attributes that hold the highest event ids; a colon and the source follow."""


def update_once(
    client: "DynamoDBClient",
    table: str,
    key: Mapping[str, Any],
    message_id: str,
    *,
    update: str,
    values: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    condition: str | None = None,
    ids: str = IDS,
    create: bool = False,
) -> bool:
    """Update one item, unless it has this message's id already, with one UpdateItem.

    ::

        update_once(
            client, "account", {"account_id": "ann"}, message.id,
            update="SET cents = cents + :cents", values={":cents": 500},
        )

    Args:
        client: a DynamoDB client of boto3, ``boto3.client("dynamodb")`` or ``txbox_aws.dynamodb.dynamodb_client()``.
        table: the table's name.
        key: the item's primary key, as Python values.
        message_id: the id of the message.
        update: the change, an UpdateExpression; may be empty.
        values: the values of its ``:placeholders``, as Python values (int, Decimal, str, bytes, bool, None, and lists,
            dicts and sets of these).
        names: the names of its ``#placeholders``.
        condition: a further ConditionExpression that must be met.
        ids: the attribute that holds the ids, a set of strings that nothing else writes to.
        create: create the item if it does not exist.

    Returns:
        True if applied. False for a duplicate: the item has this id already, perhaps from this very call if its answer
        was lost (see the module).

    Raises:
        EntityMissing: there is no such item, and ``create`` is false.
        client.exceptions.ConditionalCheckFailedException: ``condition`` is not met; nothing was changed, and the id is
            not recorded. As boto3 raises it, with the item in ``response["Item"]``.
        InvalidMessageId: the id cannot be kept.
        InvalidConfiguration: a placeholder begins like ours, ``#txbox`` or ``:txbox``; or the attribute ``ids`` holds
            something other than a set of strings.
        LedgerError: DynamoDB could not be reached, or refused the call.
        TypeError: DynamoDB cannot keep a value.
    """
    identifier = valid_message_id(message_id)
    call = _ConditionalUpdate(client, table, key, create=create, names=names, values=values, condition=condition)
    item = call.update(
        _with_action(update, "ADD", "#txbox_memory :txbox_ids"),
        "attribute_not_exists(#txbox_memory) "
        "OR attribute_type(#txbox_memory, :txbox_type) AND NOT contains(#txbox_memory, :txbox_id)",
        memory=ids,
        values={":txbox_ids": {identifier}, ":txbox_id": identifier, ":txbox_type": "SS"},
    )
    if item is None:
        return True
    memory = item.get(ids)
    if memory is not None and "SS" not in memory:
        raise InvalidConfiguration(
            f"ids must name a set of texts; in table {table}, {ids} is of type {next(iter(memory))}"
        )
    if memory is not None and identifier in memory["SS"]:
        return False
    raise call.refusal


def update_if_newer(
    client: "DynamoDBClient",
    table: str,
    key: Mapping[str, Any],
    source: str,
    event_id: EventId,
    *,
    update: str,
    values: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    condition: str | None = None,
    highest: str = HIGHEST,
    create: bool = False,
) -> bool:
    """Update one item if the event's id is higher than all earlier ones of its source, with one UpdateItem.

    ::

        update_if_newer(
            client, "product", {"product_id": 17}, "catalogue", event["sequence"],
            update="SET price = :price", values={":price": event["price"]},
        )

    ``txbox.entities.update_if_newer`` defines what ids must be. The other arguments are those of ``update_once``.

    Args:
        source: the issuer of the ids; 1 to 200 bytes. Ids of different sources are not compared.
        event_id: a number of up to 38 digits, compared as a number, or a text, compared byte by byte.
        highest: the prefix of the attribute that holds the highest id; ``:`` and the source follow.

    Returns:
        True if applied. False for a duplicate or an overtaken event; after a lost answer, perhaps by this very call.

    Raises:
        EntityMissing, client.exceptions.ConditionalCheckFailedException, LedgerError, TypeError: as ``update_once``.
        InvalidMessageId: a text that cannot be kept.
        InvalidConfiguration: a placeholder begins like ours; or a number came after a text of the same source, or a
            text after a number.
    """
    attribute = f"{highest}:{valid_source(source)}"
    identifier = valid_event_id(event_id)
    call = _ConditionalUpdate(client, table, key, create=create, names=names, values=values, condition=condition)
    item = call.update(
        _with_action(update, "SET", "#txbox_memory = :txbox_id"),
        # DynamoDB compares only values of one type; checked here so that callers need not.
        "attribute_not_exists(#txbox_memory) "
        "OR attribute_type(#txbox_memory, :txbox_type) AND #txbox_memory < :txbox_id",
        memory=attribute,
        values={":txbox_id": identifier, ":txbox_type": "S" if isinstance(identifier, str) else "N"},
    )
    if item is None:
        return True
    if attribute in item:
        before = plain({attribute: item[attribute]})[attribute]
        check_kind(source, identifier, before)
        if before >= identifier:
            return False
    raise call.refusal


class _ConditionalUpdate:
    """One UpdateItem under our condition and the caller's. After ``update``, ``refusal`` is what to raise."""

    def __init__(
        self,
        client: "DynamoDBClient",
        table: str,
        key: Mapping[str, Any],
        *,
        create: bool,
        names: Mapping[str, str] | None,
        values: Mapping[str, Any] | None,
        condition: str | None,
    ) -> None:
        self._client = client
        self._table = table
        if not key or any(isinstance(value, dict) for value in key.values()):
            raise InvalidConfiguration(
                f'key must be Python values by attribute, such as {{"id": 17}}, not {key!r:.100}'
            )
        self._key = dict(key)
        self._create = create
        self._names = dict(names or {})
        self._values = dict(values or {})
        self._condition = condition
        for placeholder in [*self._names, *self._values]:
            if placeholder[1:].startswith("txbox"):
                raise InvalidConfiguration(f"{placeholder} must not begin like the placeholders used here")
        self.refusal: Exception = EntityMissing(table, ", ".join(f"{name}={part!r}" for name, part in key.items()))

    def update(self, update: str, condition: str, *, memory: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Update the item and return None, or return the item as it is if a condition was not met.

        Raises:
            EntityMissing: there is no item, and a new one would have met the condition.
        """
        names = {**self._names, "#txbox_memory": memory}
        conditions = [_enclosed(condition)]
        if not self._create:
            names["#txbox_key"] = next(iter(self._key))
            conditions.append("attribute_exists(#txbox_key)")
        if self._condition:
            conditions.append(_enclosed(self._condition))
        try:
            with translated(DYNAMODB, self._table, _REMEDIES):
                self._client.update_item(
                    TableName=self._table,
                    Key={name: typed(value) for name, value in self._key.items()},
                    UpdateExpression=update,
                    ConditionExpression=" AND ".join(conditions),
                    ExpressionAttributeNames=names,
                    ExpressionAttributeValues={
                        name: typed(value) for name, value in {**self._values, **values}.items()
                    },
                    # The item as it was when the condition was evaluated: a separate read could see a later state.
                    ReturnValuesOnConditionCheckFailure="ALL_OLD",
                )
        except self._client.exceptions.ConditionalCheckFailedException as error:
            item = cast(dict[str, Any] | None, error.response.get("Item"))
            if item is None and not self._create:
                raise self.refusal from error
            self.refusal = error
            return item or {}
        return None


_REMEDIES = {
    "ValidationException": "; the table {table} is not what it should be, or a value cannot be kept; or `update`, "
    "`condition`, `names` or `values` do not fit together"
}


def _with_action(update: str, clause: str, action: str) -> str:
    """Return an UpdateExpression with one more action in a clause (SET or ADD), which may appear only once."""
    if found := re.search(rf"(?<![#:.\w]){clause}(?!\w)", update, re.IGNORECASE):
        return f"{update[: found.end()]} {action},{update[found.end() :]}"
    return f"{update} {clause} {action}".strip()


def _enclosed(condition: str) -> str:
    """Return a condition in one pair of parentheses. DynamoDB refuses a second pair around it as redundant."""
    text = condition.strip()
    if text.startswith("("):
        depth = 0
        for position, character in enumerate(text):
            depth += (character == "(") - (character == ")")
            if depth == 0:
                return text if position == len(text) - 1 else f"({text})"
    return f"({text})"
