"""AWS Lambda: the function behind an SQS queue, each message processed exactly once in effect."""

from txbox_aws.lambda_.async_handler import async_sqs_handler
from txbox_aws.lambda_.deadline import MARGIN_SECONDS
from txbox_aws.lambda_.handler import sqs_handler

__all__ = ["MARGIN_SECONDS", "async_sqs_handler", "sqs_handler"]
