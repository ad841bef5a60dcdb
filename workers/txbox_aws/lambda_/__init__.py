"""AWS Lambda: a function behind an SQS queue that processes each message exactly once in effect."""

from typing import TYPE_CHECKING, Any

from txbox_aws.lambda_.deadline import MARGIN_SECONDS
from txbox_aws.lambda_.handler import sqs_handler

if TYPE_CHECKING:
    from txbox_aws.lambda_.async_handler import async_sqs_handler

__all__ = ["MARGIN_SECONDS", "async_sqs_handler", "sqs_handler"]


if not TYPE_CHECKING:  # type checkers would accept any name in this module

    def __getattr__(name: str) -> Any:
        if name == "async_sqs_handler":  # it loads greenlet, which a function without coroutines does not need
            from txbox_aws.lambda_.async_handler import async_sqs_handler

            return async_sqs_handler
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
