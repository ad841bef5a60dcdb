"""How often boto3 makes a publisher's call."""

from dataclasses import replace

import pytest

from txbox_aws.publishers import EventBridgePublisher, SnsPublisher, SqsPublisher


def attempts(patch: pytest.MonkeyPatch, times: int) -> None:
    """Have the publishers that are made from now on make each call so often."""
    for publisher in (SqsPublisher, SnsPublisher, EventBridgePublisher):
        patch.setattr(publisher, "_use", replace(publisher._use, attempts=times))
