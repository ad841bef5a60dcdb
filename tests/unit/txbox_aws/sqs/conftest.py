"""A scripted SQS, a client and a source of it, and boto3 without the configuration of this machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from support.aws.boto3_settings import without_a_configuration
from support.aws.queues import QUEUE
from support.aws.scripted_sqs import ScriptedSqs
from txbox.backoff import Backoff
from txbox_aws.sqs import SqsSource
from txbox_aws.sqs import source as source_module


@pytest.fixture(autouse=True)
def _boto3_without_a_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_a_configuration(monkeypatch, tmp_path)


@pytest.fixture(autouse=True)
def _entries_are_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "ENTRY_BACKOFF", Backoff(first_seconds=0, longest_seconds=0))


@pytest.fixture
def broker() -> Iterator[ScriptedSqs]:
    broker = ScriptedSqs()
    yield broker
    broker.close()


@pytest.fixture
def client(broker: ScriptedSqs) -> Iterator[Any]:
    client = boto3.client(
        "sqs",
        region_name="eu-central-1",
        endpoint_url=broker.url,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=20),
    )
    yield client
    client.close()


@pytest.fixture
def source(client: Any) -> SqsSource:
    return SqsSource(QUEUE, client=client)
