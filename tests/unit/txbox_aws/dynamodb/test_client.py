"""boto3's errors in our words, its client, and its values as Python's."""

import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from hypothesis import given
from hypothesis import strategies as st

from support.boto3_settings import without_a_configuration
from txbox import LedgerError
from txbox_aws.clients import DYNAMODB, translated
from txbox_aws.dynamodb import dynamodb_client
from txbox_aws.dynamodb.values import plain, typed


def refused(code: str, operation: str = "UpdateItem") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "so it is"}}, operation)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("ResourceNotFoundException", "create the table letters, or correct its name"),
        ("AccessDeniedException", "grant dynamodb:UpdateItem on letters"),
        ("UnrecognizedClientException", "check AWS_ACCESS_KEY_ID"),
        ("InvalidSignatureException", "this machine's clock is off"),
        ("ExpiredTokenException", "the credentials have expired"),
        ("ValidationException", "is not what it should be"),
    ],
)
def test_what_trying_again_cannot_help_is_permanent_and_has_a_remedy(code: str, remedy: str) -> None:
    with pytest.raises(LedgerError, match=remedy) as caught, translated(DYNAMODB, "letters"):
        raise refused(code)
    assert caught.value.permanent
    assert f"DynamoDB refused UpdateItem on letters: {code}: so it is" in str(caught.value)
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


def test_a_callers_own_remedy_comes_first() -> None:
    remedies = {"AccessDenied": "; grant all of {table}"}
    with pytest.raises(LedgerError, match=r"; grant all of letters$"), translated(DYNAMODB, "letters", remedies):
        raise refused("AccessDeniedException")


def test_a_condition_that_was_not_met_is_an_answer() -> None:
    with pytest.raises(ClientError), translated(DYNAMODB, "letters"):
        raise refused("ConditionalCheckFailedException")


def test_who_cannot_be_reached_may_be_later() -> None:
    with pytest.raises(LedgerError, match="Could not connect") as caught, translated(DYNAMODB, "letters"):
        raise EndpointConnectionError(endpoint_url="http://127.0.0.1:1")
    assert not caught.value.permanent


def test_without_credentials_the_remedy_is_named() -> None:
    with pytest.raises(LedgerError, match="set AWS_ACCESS_KEY_ID") as caught, translated(DYNAMODB, "letters"):
        raise NoCredentialsError
    assert caught.value.permanent


def test_without_a_region_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_a_configuration(monkeypatch, tmp_path)
    with pytest.raises(LedgerError, match="set AWS_DEFAULT_REGION") as caught:
        dynamodb_client()
    assert caught.value.permanent


def test_a_profile_that_does_not_exist_is_our_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_a_configuration(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(LedgerError, match=r"profile \(nobody\) could not be found; correct AWS_PROFILE"):
        dynamodb_client()


def test_the_client_gives_up_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_a_configuration(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    client = dynamodb_client(attempts=2, read_seconds=1.5, connections=7)
    config: Any = client.meta.config
    assert (config.retries["total_max_attempts"], config.retries["mode"]) == (2, "standard")
    assert (config.connect_timeout, config.read_timeout, config.max_pool_connections) == (2.0, 1.5, 7)
    client.close()


def test_without_boto3_the_remedy_is_named() -> None:
    program = "import sys; sys.modules['boto3'] = None\nimport txbox_aws.clients"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "ModuleNotFoundError: boto3 is missing; install it: pip install 'txbox[aws]'" in ended.stderr


NUMBERS = st.integers(-(10**37), 10**37) | st.decimals(-1000, 1000, places=3)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text() | st.binary()
VALUES = st.recursive(SCALARS, lambda parts: st.lists(parts) | st.dictionaries(st.text(min_size=1), parts))
SETS = st.sets(NUMBERS, min_size=1) | st.sets(st.text(), min_size=1) | st.sets(st.binary(), min_size=1)


@given(VALUES | SETS)
def test_values_go_there_and_back(value: Any) -> None:
    assert plain({"value": typed(value)}) == {"value": value}


@pytest.mark.parametrize(
    ("value", "kind"), [(Decimal(7), int), (7, int), (Decimal("7.5"), Decimal), (b"7", bytes), ("7", str)]
)
def test_whole_numbers_are_int_and_bytes_are_bytes(value: Any, kind: type) -> None:
    assert type(plain({"value": typed(value)})["value"]) is kind


def test_what_dynamodb_cannot_keep_is_refused() -> None:
    with pytest.raises(TypeError, match="Float types are not supported"):
        typed(0.1)
