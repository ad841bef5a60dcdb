"""boto3's clients as a publisher needs them: quick to give up, as the relay tries again by itself; and its errors.

The only file of the publishers that imports boto3.
"""

import threading
from collections.abc import Mapping
from typing import Any, Literal

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError
from botocore.parsers import ResponseParserError

from txbox import BrokerError
from txbox_aws.publishers.faults import Fault, of_call
from txbox_aws.sqs.client import broker_error

__all__ = ["CALL_ERRORS", "Clients", "Service", "code_of", "explained", "fault_of"]

Service = Literal["sqs", "sns", "events"]

CALL_ERRORS = (BotoCoreError, ClientError, ResponseParserError)
"""What a call raises when it fails as a whole."""

ATTEMPTS = 2
"""Of a call, by boto3 itself: a second one repairs a kept connection that the other side has closed."""

_making = threading.Lock()


class Clients:
    """The clients of one service, one for each region; made when they are needed."""

    def __init__(
        self, service: Service, given: Any, *, connections: int, connect_seconds: float, read_seconds: float
    ) -> None:
        """Say how they are to be.

        Args:
            service: boto3's name of it.
            given: a client to be used for everything; None makes them.
            connections: how many calls may be under way at once.
            connect_seconds, read_seconds: how long a call waits for a connection, and for an answer.
        """
        self._service = service
        self._given = given
        self._made: dict[str | None, Any] = {}
        self._config = Config(
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            connect_timeout=connect_seconds,
            read_timeout=read_seconds,
            max_pool_connections=connections,
            tcp_keepalive=True,
            # What is sent is made here, of text only. To check it once more takes a quarter of a call's time.
            parameter_validation=False,
        )

    def of(self, region: str | None) -> Any:
        """Return the client for a region; None: for the one that is configured.

        Raises:
            BotoCoreError: no region is known, or boto3 is configured wrongly.
        """
        if self._given is not None:
            return self._given
        if (client := self._made.get(region)) is None:
            with _making:  # sessions are not made for several threads
                if (client := self._made.get(region)) is None:
                    session = boto3.session.Session()
                    client = session.client(self._service, region_name=region, config=self._config)
                    self._made[region] = client
        return client

    def close(self) -> None:
        """Close the connections of those that were made."""
        for client in self._made.values():
            client.close()
        self._made.clear()


def fault_of(error: Exception) -> Fault:
    """Tell whose fault it is that a call failed; see ``CALL_ERRORS``."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return of_call(code_of(error), status)
    return Fault.ENTRY if isinstance(error, ParamValidationError) else Fault.BROKER


def code_of(error: Exception) -> str:
    """Return an error's code, as the service or boto3 calls it."""
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return type(error).__name__


def explained(error: Exception, service: str, destination: str, remedies: Mapping[str, str]) -> BrokerError:
    """Return an error of a call in our words; see ``broker_error``."""
    if isinstance(error, ClientError | BotoCoreError):
        return broker_error(error, service, destination, remedies)
    return BrokerError(f"{service} gave an answer that cannot be read: {error}")
