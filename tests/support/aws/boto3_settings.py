"""boto3 without the configuration of this machine, and with other numbers of attempts."""

from dataclasses import replace
from pathlib import Path

import pytest

from txbox_aws.publishers import EventBridgePublisher, SnsPublisher, SqsPublisher


def without_a_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave boto3 two credentials, and nothing else that it could find."""
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SQS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


def attempts(patch: pytest.MonkeyPatch, times: int) -> None:
    """Have the publishers that are made from now on make each call so often."""
    for publisher in (SqsPublisher, SnsPublisher, EventBridgePublisher):
        patch.setattr(publisher, "_use", replace(publisher._use, attempts=times))
