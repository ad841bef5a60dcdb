"""The clients of every use: how often they try and how long they wait, and boto3's errors in our words."""

from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConfigNotFound,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.validate import ParamValidationDecorator

from support.aws.boto3_settings import without_a_configuration
from txbox import BrokerError, LedgerError
from txbox.relay.reporter import OUTAGE_CHARACTERS
from txbox_aws.clients import (
    DYNAMODB,
    EVENTBRIDGE_PUBLISHER,
    SNS_PUBLISHER,
    SQS,
    SQS_PUBLISHER,
    STEP_FUNCTIONS,
    AwsUse,
    dynamodb_client,
    make_client,
    translated,
)


def refused(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "so it is"}}, "Operate")


@pytest.mark.parametrize(
    ("use", "code", "remedy"),
    [
        (DYNAMODB, "ResourceNotFoundException", "create the table there, or correct its name"),
        (DYNAMODB, "AccessDeniedException", "grant dynamodb:Operate on there"),
        (DYNAMODB, "UnrecognizedClientException", "the access key or the session token is not known"),
        (DYNAMODB, "InvalidSignatureException", "this machine's clock is off"),
        (DYNAMODB, "ExpiredTokenException", "the credentials have expired"),
        (DYNAMODB, "ValidationException", "is not what it should be"),
        (SQS, "AWS.SimpleQueueService.NonExistentQueue", "create the queue, or correct its URL, region or account"),
        (SQS, "AccessDeniedException", "grant sqs:ReceiveMessage"),
        (SQS, "InvalidClientTokenId", "check AWS_ACCESS_KEY_ID"),
        (SQS, "SignatureDoesNotMatch", "check AWS_SECRET_ACCESS_KEY"),
        (SQS, "InvalidAddress", "the URL is not that of a queue"),
        (SQS_PUBLISHER, "AWS.SimpleQueueService.NonExistentQueue", "create the queue"),
        (SQS_PUBLISHER, "AccessDenied", "grant sqs:SendMessage"),
        (SNS_PUBLISHER, "NotFound", "create the topic"),
        (SNS_PUBLISHER, "AuthorizationError", "grant sns:Publish"),
        (EVENTBRIDGE_PUBLISHER, "ResourceNotFoundException", "create the event bus"),
        (EVENTBRIDGE_PUBLISHER, "AccessDeniedException", "grant events:PutEvents"),
    ],
)
def test_what_trying_again_cannot_help_is_permanent_and_has_a_remedy(use: AwsUse[Any], code: str, remedy: str) -> None:
    with pytest.raises(use.error, match=remedy) as caught, translated(use, "there"):
        raise refused(code)
    assert caught.value.permanent
    assert f"{use.title} refused Operate on there: {code}: so it is" in str(caught.value)
    assert isinstance(caught.value.__cause__, ClientError)


@pytest.mark.parametrize(
    "code",
    [
        "ProvisionedThroughputExceededException",
        "ThrottlingException",
        "RequestLimitExceeded",
        "InternalServerError",
        "TransactionConflictException",
        "TransactionInProgressException",
        "LimitExceededException",
    ],
)
def test_what_passes_is_transient(code: str) -> None:
    with pytest.raises(LedgerError, match=code) as caught, translated(DYNAMODB, "letters"):
        raise refused(code)
    assert not caught.value.permanent


@pytest.mark.parametrize("code", ["InvalidSignatureException", "RequestTimeTooSkewed", "RequestExpired"])
def test_a_clock_that_is_off_may_be_set_while_a_broker_is_tried_again(code: str) -> None:
    for use in (SQS, SQS_PUBLISHER, SNS_PUBLISHER, EVENTBRIDGE_PUBLISHER, STEP_FUNCTIONS):
        with pytest.raises(BrokerError, match="this machine's clock is off") as caught, translated(use, "there"):
            raise refused(code)
        assert not caught.value.permanent
    with pytest.raises(LedgerError, match="this machine's clock is off") as ledger, translated(DYNAMODB, "letters"):
        raise refused(code)
    assert ledger.value.permanent


def test_a_callers_own_remedy_comes_first() -> None:
    remedies = {"AccessDenied": "; grant all of {table}"}
    with pytest.raises(LedgerError, match=r"; grant all of letters$"), translated(DYNAMODB, "letters", remedies):
        raise refused("AccessDeniedException")


def test_a_condition_that_was_not_met_is_an_answer() -> None:
    with pytest.raises(ClientError), translated(DYNAMODB, "letters"):
        raise refused("ConditionalCheckFailedException")


def test_who_cannot_be_reached_may_be_later() -> None:
    with (
        pytest.raises(LedgerError, match="DynamoDB cannot be reached: Could not connect") as caught,
        translated(DYNAMODB, "letters"),
    ):
        raise EndpointConnectionError(endpoint_url="http://127.0.0.1:1")
    assert not caught.value.permanent


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NoCredentialsError(), "Unable to locate credentials; set AWS_ACCESS_KEY_ID and "),
        (PartialCredentialsError(provider="env", cred_var="x"), "Partial credentials found in env, missing: x; set "),
    ],
)
def test_without_credentials_the_remedy_is_named(error: BotoCoreError, text: str) -> None:
    with pytest.raises(LedgerError, match=f"^DynamoDB cannot be used: {text}") as caught, translated(DYNAMODB, "there"):
        raise error
    assert caught.value.permanent


def test_without_a_region_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_a_configuration(monkeypatch, tmp_path)
    with pytest.raises(LedgerError) as caught:
        dynamodb_client()
    assert str(caught.value) == "DynamoDB cannot be used: You must specify a region; set AWS_DEFAULT_REGION"
    assert caught.value.permanent


def test_a_profile_that_does_not_exist_is_our_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_a_configuration(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    for use in (DYNAMODB, SNS_PUBLISHER, EVENTBRIDGE_PUBLISHER):
        text = r"profile \(nobody\) could not be found; correct AWS_PROFILE$"
        with pytest.raises(use.error, match=text) as caught, translated(use, "there"):
            make_client(use)
        assert caught.value.permanent


def test_a_remedy_for_what_aws_lacks_is_none_for_what_boto3_lacks() -> None:
    """SNS calls a topic that there is not NotFound, and boto3 a missing file ConfigNotFound."""
    text = r"config file \(here\) could not be found\.?$"
    with pytest.raises(BrokerError, match=text) as caught, translated(SNS_PUBLISHER, "there"):
        raise ConfigNotFound(path="here")
    assert not caught.value.permanent


def test_the_client_gives_up_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_a_configuration(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    client = dynamodb_client(attempts=2, read_seconds=1.5, connections=7)
    config: Any = client.meta.config
    assert (config.retries["total_max_attempts"], config.retries["mode"]) == (2, "standard")
    assert (config.connect_timeout, config.read_timeout, config.max_pool_connections) == (2.0, 1.5, 7)
    client.close()


@pytest.mark.parametrize(
    ("use", "service", "attempts", "connect_seconds", "read_seconds", "checked"),
    [
        (SQS, "sqs", 3, 5, 25, True),
        (SQS_PUBLISHER, "sqs", 2, 5, 10, False),
        (SNS_PUBLISHER, "sns", 2, 5, 10, False),
        (EVENTBRIDGE_PUBLISHER, "events", 2, 5, 10, False),
        (STEP_FUNCTIONS, "stepfunctions", 3, 5, 10, True),
        (DYNAMODB, "dynamodb", 3, 2, 5, True),
    ],
)
def test_each_use_has_its_own_patience(
    use: AwsUse[Any], service: str, attempts: int, connect_seconds: float, read_seconds: float, checked: bool
) -> None:
    client = make_client(use, region="eu-central-1")
    config = client.meta.config
    assert (client.meta.service_model.service_name, config.retries["mode"]) == (service, "standard")
    assert config.retries["total_max_attempts"] == attempts
    assert isinstance(client._serializer, ParamValidationDecorator) == checked
    assert (config.connect_timeout, config.read_timeout, config.tcp_keepalive) == (connect_seconds, read_seconds, True)
    client.close()


def test_of_what_aws_says_one_line_is_kept() -> None:
    """A wrong signature is explained with the whole request, headers included."""
    said = {"Error": {"Code": "SignatureDoesNotMatch", "Message": "It does not match.\n\nIt should have been: GET /"}}
    with pytest.raises(BrokerError) as caught, translated(SQS, "there"):
        raise ClientError(said, "ReceiveMessage")  # type: ignore[arg-type]
    assert str(caught.value).startswith(
        "SQS refused ReceiveMessage on there: SignatureDoesNotMatch: It does not match; "
    )
    assert "GET" not in str(caught.value)


def test_a_long_message_of_aws_leaves_room_for_the_remedy() -> None:
    said = {"Error": {"Code": "AccessDenied", "Message": "User: arn " + "x" * 600}}
    with pytest.raises(BrokerError) as caught, translated(SQS_PUBLISHER, "https://sqs.eu-central-1.amazonaws.com/1/a"):
        raise ClientError(said, "SendMessageBatch")  # type: ignore[arg-type]
    assert str(caught.value).endswith("xxx…; grant sqs:SendMessage")
    assert len(str(caught.value)) < OUTAGE_CHARACTERS


def test_what_is_other_in_each_answer_is_left_out() -> None:
    """A relay writes its row of the status whenever the text of an outage changes."""
    for said, kept in (
        (
            "Signature expired: 20261122T210516Z is now earlier than 20261122T210517Z (20261122T211017Z - 5 min.)",
            "Signature expired: … is now earlier than … (… - 5 min.)",
        ),
        (
            "No. (Service: AWSKMS; Request ID: 5c0ffee5-1d; Proxy: null)",
            "No. (Service: AWSKMS; Request ID: …; Proxy: null)",
        ),
    ):
        with pytest.raises(BrokerError) as caught, translated(SQS, "there"):
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": said}}, "ReceiveMessage")
        assert f"AccessDenied: {kept}; grant" in str(caught.value)
