"""Make boto3's clients, and translate boto3's errors. One table says how each AWS service is called.

Region, credentials and endpoints are boto3's own settings, and so are its environment variables.
"""

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from txbox import BrokerError, __version__
from txbox.errors import LedgerError
from txbox.extras import needs

with needs("aws"):
    import boto3
    import botocore
    import botocore.session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
    from botocore.exceptions import ConnectionError as ConnectionFailed
    from botocore.loaders import Loader, create_loader

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient
    from types_boto3_sqs import SQSClient
    from types_boto3_stepfunctions import SFNClient

WAIT_SECONDS = 10
"""How long a long poll waits. Also about the longest that an idle worker takes to stop."""

MESSAGE_CHARACTERS = 200
"""How much of AWS's text about an error is kept."""

_Error = TypeVar("_Error", BrokerError, LedgerError)


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsUse(Generic[_Error]):
    """How one service is called for one purpose."""

    service: str  # boto3's name for it
    title: str  # its name in errors
    error: type[_Error]  # what boto3's errors become
    remedies: Mapping[str, str]
    """What to do about an error, by a part of AWS's code or by the full name of boto3's exception. They come before
    those in ``_REMEDIES``."""
    attempts: int = 3  # per call, by boto3 itself
    connect_seconds: float = 5.0  # how long an attempt waits for a connection
    read_seconds: float = 10.0  # how long it waits for an answer
    connections: int = 10  # how many calls may be in progress at once
    checks_parameters: bool = True  # whether boto3 checks a call's parameters before it sends them
    answers: tuple[str, ...] = ()  # codes of expected errors: boto3's error passes through
    passing: tuple[str, ...] = ("InvalidSignature", "RequestTimeTooSkewed", "RequestExpired")  # a clock may be set
    """Parts of the codes of errors that are not permanent even though they have a remedy."""


_NO_QUEUE = "; create the queue, or correct its URL, region or account"
_NO_KEY = "; the access key is not known: check AWS_ACCESS_KEY_ID"
_NO_CREDENTIALS = "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or any other of boto3's ways"
_CLOCK = "; this machine's clock is off by more than AWS takes for a signature: set it"
_SIGNATURE = (
    "; the secret key does not fit: check AWS_SECRET_ACCESS_KEY; or this machine's clock is off by more than AWS takes "
    "for a signature: set it"
)
_QUEUE_REMEDIES = {
    "NonExistentQueue": _NO_QUEUE,
    "QueueDoesNotExist": _NO_QUEUE,
    "InvalidAddress": "; the URL is not that of a queue",
}

_REMEDIES = {
    "InvalidClientTokenId": _NO_KEY,
    "UnrecognizedClient": "; the access key or the session token is not known: check AWS_ACCESS_KEY_ID",
    "MissingAuthenticationToken": _NO_CREDENTIALS,
    "ExpiredToken": "; the credentials have expired",
    "InvalidSignature": _SIGNATURE,
    "SignatureDoesNotMatch": _SIGNATURE,
    "RequestTimeTooSkewed": _CLOCK,
    "RequestExpired": _CLOCK,
    "NoRegionError": "; set AWS_DEFAULT_REGION",
    "NoCredentialsError": _NO_CREDENTIALS,
    "PartialCredentialsError": _NO_CREDENTIALS,
    "ProfileNotFound": "; correct AWS_PROFILE",
}
"""For every use; see ``AwsUse.remedies``."""

SQS = AwsUse(
    service="sqs",
    title="SQS",
    error=BrokerError,
    remedies={
        "AccessDenied": "; grant sqs:ReceiveMessage, DeleteMessage, ChangeMessageVisibility and GetQueueAttributes",
        **_QUEUE_REMEDIES,
    },
    read_seconds=WAIT_SECONDS + 15,
)

PUBLISHER = AwsUse(
    service="",
    title="",
    error=BrokerError,
    remedies={},
    attempts=2,  # the relay tries again itself; the second attempt is for kept connections that were closed
    checks_parameters=False,  # entries are made here, from text only; checking takes a quarter of a call's time
)
SQS_PUBLISHER = replace(
    PUBLISHER, service="sqs", title="SQS", remedies={"AccessDenied": "; grant sqs:SendMessage", **_QUEUE_REMEDIES}
)
SNS_PUBLISHER = replace(
    PUBLISHER,
    service="sns",
    title="SNS",
    remedies={
        "NotFound": "; create the topic, or correct its ARN",
        "AuthorizationError": "; grant sns:Publish",
        "AccessDenied": "; grant sns:Publish",
    },
)
EVENTBRIDGE_PUBLISHER = replace(
    PUBLISHER,
    service="events",
    title="EventBridge",
    remedies={
        "ResourceNotFound": "; create the event bus, or correct its ARN",
        "AccessDenied": "; grant events:PutEvents",
    },
)

STEP_FUNCTIONS = AwsUse(
    service="stepfunctions",
    title="Step Functions",
    error=BrokerError,
    remedies={
        "AccessDenied": "; grant states:StartExecution, DescribeExecution and DescribeStateMachine",
        "StateMachineDoesNotExist": "; create the state machine, or correct its ARN, region or account",
        "StateMachineDeleting": "; it is being deleted",
        "ResourceNotFound": "; create the version or alias, or correct the ARN",
        "InvalidArn": "; correct the ARN",
        "InvalidExecutionInput": "; the input is not what Step Functions takes",
    },
    connections=32,
)

# DynamoDB answers within milliseconds, and a lease expires while its owner waits for an answer.
DYNAMODB = AwsUse(
    service="dynamodb",
    title="DynamoDB",
    error=LedgerError,
    remedies={
        "ResourceNotFound": "; create the table {table}, or correct its name, the region or the account",
        "AccessDenied": "; grant dynamodb:{operation} on {table}",
        "ValidationException": "; the table {table} is not what it should be, or a value cannot be kept",
        "ParamValidationError": "; the call is not one that DynamoDB takes",
    },
    connect_seconds=2.0,
    read_seconds=5.0,
    connections=32,
    answers=("ConditionalCheckFailedException",),
    passing=(),  # a lease expires: nothing waits for a clock to be set
)


def make_client(use: AwsUse[Any], *, region: str | None = None) -> Any:
    """Return a client for a use in a region; None uses the region that boto3 is configured for.

    Raises ``BotoCoreError`` if boto3 has no region or is configured wrongly.
    """
    # A session of its own: boto3's default session is not thread-safe.
    session = botocore.session.get_session()
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    return session.create_client(
        use.service,
        region_name=region,
        config=Config(
            retries={"mode": "standard", "total_max_attempts": use.attempts},
            connect_timeout=use.connect_seconds,
            read_timeout=use.read_seconds,
            max_pool_connections=use.connections,
            parameter_validation=use.checks_parameters,
            tcp_keepalive=True,
            user_agent=_user_agent(session),
        ),
    )


@cache
def _loader(data_path: str | None) -> Loader:
    """Return a loader that caches botocore's descriptions of AWS: reading them takes most of the time to make a client.

    It has no lock and needs none: two threads at once read the same thing twice.
    """
    return create_loader(data_path)


def _user_agent(session: botocore.session.Session) -> str:
    """Return a fixed text: boto3 builds its own twice for each call, which takes a tenth of the call's time.

    It includes the application's id, if that is set, in boto3's format.
    """
    app_id = session.get_config_variable("user_agent_appid") or ""
    app = f" app/{re.sub(_NOT_IN_USER_AGENT, '-', app_id)}" if app_id else ""
    return f"Boto3/{boto3.__version__} txbox/{__version__}{app} Botocore/{botocore.__version__}"


_NOT_IN_USER_AGENT = r"[^A-Za-z0-9!#$%&'*+.^_`|~,-]"


def sqs_client(
    queue_url: str,
    *,
    wait_seconds: float = WAIT_SECONDS,
    connections: int = 10,
    checks_parameters: bool = True,
) -> "SQSClient":
    """Return a client of SQS for receivers: its calls may last as long as long polls.

    Without a configured region, it uses the one in the queue's URL.

    Args:
        queue_url: the queue's URL.
        wait_seconds: the longest long poll.
        connections: how many calls may be in progress at once.
        checks_parameters: whether boto3 checks a call's parameters before it sends them.

    Raises:
        BrokerError: boto3 has no region or is configured wrongly.
    """
    in_url = re.match(r"https://sqs\.([a-z0-9-]+)\.amazonaws\.com", queue_url)
    with translated(SQS, queue_url):
        region = boto3.session.Session().region_name or (in_url.group(1) if in_url else None)
        use = replace(
            SQS,
            read_seconds=wait_seconds + 15,
            connections=connections,
            checks_parameters=checks_parameters,
        )
        client: SQSClient = make_client(use, region=region)
        return client


def dynamodb_client(
    *,
    attempts: int = DYNAMODB.attempts,
    connect_seconds: float = DYNAMODB.connect_seconds,
    read_seconds: float = DYNAMODB.read_seconds,
    connections: int = DYNAMODB.connections,
    checks_parameters: bool = True,
) -> "DynamoDBClient":
    """Return a client of DynamoDB with short timeouts.

    Args:
        attempts: how often boto3 itself tries a call: it repeats throttled calls and those whose answer was lost.
        connect_seconds, read_seconds: how long an attempt waits for a connection, and for an answer.
        connections: how many calls may be in progress at once.
        checks_parameters: whether boto3 checks a call's parameters before it sends them.

    Raises:
        LedgerError: boto3 has no region or is configured wrongly.
    """
    with translated(DYNAMODB, "any table"):
        client: DynamoDBClient = make_client(
            replace(
                DYNAMODB,
                attempts=attempts,
                connect_seconds=connect_seconds,
                read_seconds=read_seconds,
                connections=connections,
                checks_parameters=checks_parameters,
            )
        )
        return client


def stepfunctions_client(region: str | None = None) -> "SFNClient":
    """Return a client of Step Functions with short timeouts.

    Args:
        region: where the state machine is; None leaves it to boto3.
    """
    client: SFNClient = make_client(STEP_FUNCTIONS, region=region)
    return client


class RegionalClients:
    """Clients of one use, one per region, made when they are needed. Several threads may use it."""

    def __init__(self, use: AwsUse[Any], given: Any = None) -> None:
        """``given`` is a client to use for everything."""
        self._use = use
        self._given = given
        self._made: dict[str | None, Any] = {}
        self._making = threading.Lock()

    def of(self, region: str | None) -> Any:
        """Return the client for a region, made by ``make_client``; None means the configured region."""
        if self._given is not None:
            return self._given
        if (client := self._made.get(region)) is None:
            with self._making:
                if (client := self._made.get(region)) is None:
                    client = self._made[region] = make_client(self._use, region=region)
        return client

    def close(self) -> None:
        """Close the connections of the clients that were made here."""
        for client in self._made.values():
            client.close()
        self._made.clear()


@contextlib.contextmanager
def translated(use: AwsUse[Any], target: str, remedies: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn boto3's errors into ours; see ``translation``. The codes in ``use.answers`` pass through."""
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        if code_of(error) in use.answers:
            raise
        raise translation(use, error, target, remedies) from error


def translation(
    use: AwsUse[_Error], error: Exception, target: str, remedies: Mapping[str, str] | None = None
) -> _Error:
    """Return boto3's error as ours, with the remedy. It is permanent if there is a remedy, except for ``use.passing``.

    ``target`` is what the call was about: a queue's URL, a table, or something else. ``remedies`` are this call's, and
    come before those of the use; ``{table}`` and ``{operation}`` are filled in.
    """
    operation, code = "", code_of(error)
    verb = "reached" if isinstance(error, ConnectionFailed | HTTPClientError) else "used"
    text = f"{use.title} cannot be {verb}: {str(error).rstrip('.')}"
    if isinstance(error, ClientError):
        operation = error.operation_name
        message = _shortened(str(error.response.get("Error", {}).get("Message") or ""))
        text = f"{use.title} refused {operation} on {target}: {code}{message and f': {message}'}"
    elif not isinstance(error, BotoCoreError):
        text = f"{use.title} gave an answer that cannot be read: {error}"
    rows = (row for table in (remedies or {}, use.remedies, _REMEDIES) for row in table.items())
    # A part of AWS's code is enough: services call the same thing differently. Exceptions of boto3 match by full name.
    remedy = next((text for name, text in rows if name == code or (operation and name in code)), "")
    permanent = bool(remedy) and not any(part in code for part in use.passing)
    return use.error(text + remedy.format(operation=operation, table=target), permanent=permanent)


def _shortened(message: str) -> str:
    """Return AWS's text in one line, without what differs in each answer, so that the text of an outage stays the same.

    It is cut because a remedy follows and a status keeps 500 characters of both. The text about a wrong signature would
    go on with the whole request.
    """
    line = _OTHER_EACH_TIME.sub("…", next(iter(message.splitlines()), ""))
    return f"{line[:MESSAGE_CHARACTERS]}…" if len(line) > MESSAGE_CHARACTERS else line.rstrip(".")


def code_of(error: Exception) -> str:
    """Return an error's code, as the service or boto3 calls it."""
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return type(error).__name__


_OTHER_EACH_TIME = re.compile(r"\b\d{8}T\d{6}Z\b|(?<=Request ID: )[\w-]+")
"""The times of signatures, and the ids of calls that one service has made to another, such as SQS to KMS."""
