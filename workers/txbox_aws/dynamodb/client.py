"""The client of DynamoDB: boto3 as ledgers and entities need it, its errors in our words, and its values as Python's.

Needs ``pip install 'txbox[aws]'``. Of the library, only this file imports boto3.
"""

import contextlib
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from txbox.errors import LedgerError

try:
    import boto3
    from boto3.dynamodb.types import Binary, TypeDeserializer, TypeSerializer
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
except ModuleNotFoundError as error:
    raise ImportError("boto3 is missing; install it: pip install 'txbox[aws]'") from error

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient

__all__ = ["dynamodb_client", "plain", "translated", "typed"]

CONDITION_FAILED = "ConditionalCheckFailedException"


def dynamodb_client(
    *, attempts: int = 3, connect_seconds: float = 2.0, read_seconds: float = 5.0, connections: int = 32
) -> "DynamoDBClient":
    """Make a client whose calls end soon: region, credentials and endpoint are boto3's own business.

    DynamoDB answers within milliseconds; whoever waits here for an answer holds a lease that runs.

    Args:
        attempts: of a call, by boto3 itself: it repeats throttled calls, and those whose answer was lost.
        connect_seconds, read_seconds: how long an attempt waits for a connection, and for an answer.
        connections: how many calls may be under way at once.

    Raises:
        LedgerError: boto3 has no region, or is configured wrongly.
    """
    with translated("any table"):
        # A session of its own: boto3's default one is not made for several threads.
        return boto3.session.Session().client(
            "dynamodb",
            config=Config(
                retries={"mode": "standard", "total_max_attempts": attempts},
                connect_timeout=connect_seconds,
                read_timeout=read_seconds,
                max_pool_connections=connections,
                tcp_keepalive=True,
            ),
        )


@contextlib.contextmanager
def translated(table: str, remedies: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn boto3's errors into ours, with the remedy.

    A condition that was not met is no trouble, but an answer: it passes through, for the caller to catch as
    ``client.exceptions.ConditionalCheckFailedException``.

    Args:
        table: which the call is about.
        remedies: what to do, by what the error's code contains; before those that are known here.

    Raises:
        LedgerError: permanent if there is a remedy, as trying again is none.
    """
    try:
        yield
    except ClientError as error:
        details = error.response.get("Error", {})
        code = details.get("Code", "")
        if code == CONDITION_FAILED:
            raise
        known = (*(remedies or {}).items(), *_REMEDIES.items())
        remedy = next((text for name, text in known if name in code), "")
        remedy = remedy.format(operation=error.operation_name, table=table)
        text = f"DynamoDB refused {error.operation_name} on {table}: {code}: {details.get('Message', '')}{remedy}"
        raise LedgerError(text, permanent=bool(remedy)) from error
    except BotoCoreError as error:
        remedy = _CLIENT_REMEDIES.get(type(error).__name__, "")
        raise LedgerError(f"DynamoDB cannot be used: {error}{remedy}", permanent=bool(remedy)) from error


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

_SIGNATURE = (
    "; the secret key does not fit: check AWS_SECRET_ACCESS_KEY; or this machine's clock is off by more than AWS takes "
    "for a signature: set it"
)

_REMEDIES = {
    "ResourceNotFound": "; create the table {table}, or correct its name, the region or the account",
    "AccessDenied": "; grant dynamodb:{operation} on {table}",
    "UnrecognizedClient": "; the access key or the session token is not known: check AWS_ACCESS_KEY_ID",
    "InvalidClientTokenId": "; the access key is not known: check AWS_ACCESS_KEY_ID",
    "MissingAuthenticationToken": "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or any other of boto3's ways",
    "ExpiredToken": "; the credentials have expired",
    "InvalidSignature": _SIGNATURE,
    "SignatureDoesNotMatch": _SIGNATURE,
    "RequestTimeTooSkewed": "; this machine's clock is off by more than AWS takes for a signature: set it",
    "RequestExpired": "; this machine's clock is off by more than AWS takes for a signature: set it",
    "ValidationException": "; the table {table} is not what it should be, or a value cannot be kept",
}

_CLIENT_REMEDIES = {
    "NoRegionError": "; set AWS_DEFAULT_REGION",
    "NoCredentialsError": "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or any other of boto3's ways",
    "PartialCredentialsError": "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or any other of boto3's ways",
    "ProfileNotFound": "; correct AWS_PROFILE",
    "ParamValidationError": "; the call is not one that DynamoDB takes",
}
