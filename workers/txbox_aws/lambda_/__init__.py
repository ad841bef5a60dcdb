"""AWS Lambda: a function behind an SQS queue that processes each message exactly once in effect."""

from typing import TYPE_CHECKING

from txbox.lazy_names import lazy_names
from txbox_aws.lambda_.deadline import MARGIN_SECONDS
from txbox_aws.lambda_.handler import sqs_handler

if TYPE_CHECKING:
    from txbox_aws.lambda_.async_handler import async_sqs_handler
else:  # it loads greenlet, which a function without coroutines does not need
    __getattr__, __dir__ = lazy_names(__name__, {"async_sqs_handler": "txbox_aws.lambda_.async_handler"})

__all__ = ["MARGIN_SECONDS", "async_sqs_handler", "sqs_handler"]
