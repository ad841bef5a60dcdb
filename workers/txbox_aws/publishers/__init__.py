"""Publishers for the outbox's relay: SQS, SNS and EventBridge.

::

    Relay(engine, aws_publishers()).run()
"""

from typing import Any

from txbox.messages.destinations import EVENTBRIDGE, SNS, SQS
from txbox_aws.publishers.publisher import AwsPublisher
from txbox_aws.publishers.services import EventBridgePublisher, SnsPublisher, SqsPublisher

__all__ = ["AwsPublisher", "EventBridgePublisher", "SnsPublisher", "SqsPublisher", "aws_publishers"]


def aws_publishers(**options: Any) -> dict[str, AwsPublisher]:
    """Return a publisher for each kind of AWS destination, by the name that a relay looks for.

    They do not connect or look for credentials before the first message is sent.

    Args:
        options: passed to each of them: ``calls_at_once``, ``connect_timeout_seconds``, ``read_timeout_seconds``.
    """
    return {
        SQS: SqsPublisher(**options),
        SNS: SnsPublisher(**options),
        EVENTBRIDGE: EventBridgePublisher(**options),
    }
