"""The client of SQS: boto3 as a worker needs it, and its errors in our words.

Only clients import boto3: this file for those who receive, ``txbox_aws.publishers.clients`` for those who send,
``txbox_aws.step_functions`` and ``txbox_aws.dynamodb.client`` for what their names say.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from txbox import BrokerError

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["WAIT_SECONDS", "broker_error", "given_or_own", "sqs_client", "translated"]

WAIT_SECONDS = 10
"""Of long polling. Also about the longest that an idle worker takes to stop."""


def sqs_client(queue_url: str, *, wait_seconds: float = WAIT_SECONDS, connections: int = 10) -> "SQSClient":
    """Make a client as a worker needs it: patient with long polls, and with retries of its own.

    Region and credentials are boto3's own business; without a configured region, the one in the queue's URL is taken.

    Args:
        queue_url: the queue's URL.
        wait_seconds: the longest long poll.
        connections: how many calls may be under way at once.
    """
    in_url = re.match(r"https://sqs\.([a-z0-9-]+)\.amazonaws\.com", queue_url)
    with translated():
        session = boto3.session.Session()
        return session.client(
            "sqs",
            region_name=session.region_name or (in_url.group(1) if in_url else None),
            config=Config(
                retries={"mode": "standard", "total_max_attempts": 3},
                connect_timeout=5,
                read_timeout=wait_seconds + 15,
                max_pool_connections=connections,
                tcp_keepalive=True,
            ),
        )


@contextlib.contextmanager
def given_or_own(client: "SQSClient | None", queue_url: str = "") -> Iterator["SQSClient"]:
    """Lend the client that the caller gave, or else one that is made for the queue and closed afterwards."""
    if client is not None:
        yield client
        return
    with contextlib.closing(sqs_client(queue_url)) as own:
        yield own


@contextlib.contextmanager
def translated(queue_url: str = "") -> Iterator[None]:
    """Turn boto3's errors into ours, with the remedy."""
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        raise broker_error(error, "SQS", queue_url) from error


def broker_error(
    error: ClientError | BotoCoreError, service: str, target: str, remedies: Mapping[str, str] | None = None
) -> BrokerError:
    """Return what boto3 says in our words, with the remedy.

    Args:
        error: boto3's.
        service: who was called, as people call it.
        target: the queue's URL, or whatever the call was about.
        remedies: what to do, by what the error's code contains; the others are those for who receives from SQS.

    Returns:
        The error; permanent if there is a remedy, as trying again is none.
    """
    if isinstance(error, ClientError):
        code = error.response.get("Error", {}).get("Code", "")
        remedy = next((text for name, text in {**_REMEDIES, **(remedies or {})}.items() if name in code), "")
        text = f"{service} refused {error.operation_name} on {target}: {code}{remedy}"
    else:
        remedy = _CLIENT_REMEDIES.get(type(error).__name__, "")
        text = f"{service} cannot be reached: {error}{remedy}"
    return BrokerError(text, permanent=bool(remedy))


_REMEDIES = {
    "NonExistentQueue": "; create the queue, or correct its URL, region or account",
    "QueueDoesNotExist": "; create the queue, or correct its URL, region or account",
    "AccessDenied": "; grant sqs:ReceiveMessage, DeleteMessage, ChangeMessageVisibility and GetQueueAttributes",
    "InvalidClientTokenId": "; the access key is not known: check AWS_ACCESS_KEY_ID",
    "InvalidAddress": "; the URL is not that of a queue",
    "SignatureDoesNotMatch": "; the secret key does not fit: check AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": "; the credentials have expired",
}

_CLIENT_REMEDIES = {
    "NoRegionError": "; set AWS_DEFAULT_REGION",
    "NoCredentialsError": "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or any other of boto3's ways",
}
