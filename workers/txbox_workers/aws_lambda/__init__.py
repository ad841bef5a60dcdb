"""AWS Lambda: the function behind an SQS queue, each message processed exactly once in effect."""

from txbox_workers.aws_lambda.deadline import MARGIN_SECONDS
from txbox_workers.aws_lambda.handler import sqs_handler

__all__ = ["MARGIN_SECONDS", "sqs_handler"]
