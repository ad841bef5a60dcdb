"""Values and items of DynamoDB as Python's."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from boto3.dynamodb.types import Binary, TypeDeserializer, TypeSerializer


def typed(value: Any) -> Any:
    """Return a Python value as DynamoDB's client takes it, such as ``{"N": "1"}``.

    Args:
        value: None, a bool, int, Decimal, str, bytes, or a list, dict or set of these; no float, as it is not exact.

    Raises:
        TypeError: DynamoDB cannot keep such a value.
    """
    return _to_dynamodb.serialize(value)


def plain(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as DynamoDB's client gives it as Python values: whole numbers are int, others Decimal."""
    return {name: _simple(_from_dynamodb.deserialize(value)) for name, value in item.items()}


def _simple(value: Any) -> Any:
    """Replace what boto3 makes of numbers and bytes, in lists, sets and maps too."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else value
    if isinstance(value, Binary):
        return value.value  # type: ignore[attr-defined]  # the stubs do not list it
    if isinstance(value, list | set):
        return type(value)(_simple(part) for part in value)
    if isinstance(value, dict):
        return {name: _simple(part) for name, part in value.items()}
    return value


_to_dynamodb = TypeSerializer()
_from_dynamodb = TypeDeserializer()
