"""The client: its region, its patience, and boto3's errors in our words, with the remedy."""

from contextlib import closing

import boto3
import botocore
import pytest
from botocore.exceptions import ParamValidationError
from botocore.validate import ParamValidationDecorator

import txbox
from support.aws.queues import QUEUE
from support.aws.scripted_sqs import ScriptedSqs
from txbox import BrokerError
from txbox_aws.sqs import SqsSource, sqs_client


@pytest.mark.parametrize(
    ("configured", "url", "region"),
    [
        (None, QUEUE, "eu-central-1"),
        (None, "https://sqs.cn-north-1.amazonaws.com.cn/123456789012/purchases", "cn-north-1"),
        ("us-east-1", QUEUE, "us-east-1"),
    ],
)
def test_the_region_is_boto3s_own_or_that_of_the_url(
    monkeypatch: pytest.MonkeyPatch, configured: str | None, url: str, region: str
) -> None:
    if configured:
        monkeypatch.setenv("AWS_DEFAULT_REGION", configured)
    client = sqs_client(url)
    assert client.meta.region_name == region
    client.close()


def test_a_client_waits_longer_than_its_longest_poll() -> None:
    client = sqs_client(QUEUE, wait_seconds=20, connections=7)
    assert client.meta.config.read_timeout > 20
    assert client.meta.config.max_pool_connections == 7
    client.close()


@pytest.mark.parametrize(
    ("app_id", "app"), [(None, ""), ("billing", "app/billing "), ("à la carte", "app/--la-carte ")]
)
def test_calls_name_boto3_and_txbox_and_the_application(
    monkeypatch: pytest.MonkeyPatch, broker: ScriptedSqs, app_id: str | None, app: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", broker.url)
    if app_id:
        monkeypatch.setenv("AWS_SDK_UA_APP_ID", app_id)
    source = SqsSource(QUEUE)
    source.open()
    source.close()
    versions = f"Boto3/{boto3.__version__} txbox/{txbox.__version__} "
    assert [call.user_agent for call in broker.calls] == [f"{versions}{app}Botocore/{botocore.__version__}"]


def test_boto3_checks_the_calls_of_others_and_not_those_of_a_source(
    monkeypatch: pytest.MonkeyPatch, broker: ScriptedSqs
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", broker.url)
    with closing(sqs_client(QUEUE)) as client, pytest.raises(ParamValidationError):
        client.receive_message(QueueUrl=QUEUE, WaitTimeSeconds="10")  # type: ignore[arg-type]
    source = SqsSource(QUEUE)
    assert not isinstance(source._client._serializer, ParamValidationDecorator)  # type: ignore[attr-defined]
    source.close()


# --- errors ----------------------------------------------------------------------------------------------------------


def test_without_any_region_the_remedy_is_named() -> None:
    with pytest.raises(BrokerError, match="set AWS_DEFAULT_REGION") as caught:
        SqsSource("http://127.0.0.1:9324/000000000000/purchases").open()
    assert caught.value.permanent


def test_a_profile_that_does_not_exist_is_the_brokers_error_and_not_botocores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(BrokerError, match=r"profile \(nobody\) could not be found"):
        sqs_client(QUEUE)
