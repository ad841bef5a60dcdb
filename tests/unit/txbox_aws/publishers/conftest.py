"""A scripted AWS, publishers that find it, and boto3 without the configuration of this machine."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.aws.boto3_settings import attempts, without_a_configuration
from support.aws.scripted_aws import ScriptedAws
from txbox_aws.publishers import AwsPublisher, aws_publishers


@pytest.fixture(autouse=True)
def _boto3_without_a_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_a_configuration(monkeypatch, tmp_path)


@pytest.fixture(scope="session")
def _ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedAws, dict[str, AwsPublisher]]]:
    """A server, and publishers whose clients are made already: that takes longer than most of these tests."""
    broker = ScriptedAws()
    with pytest.MonkeyPatch.context() as patch:
        without_a_configuration(patch, tmp_path_factory.mktemp("aws"))
        patch.setenv("AWS_ENDPOINT_URL", broker.url)
        attempts(patch, 1)
        publishers = aws_publishers()
        for publisher in publishers.values():
            publisher._clients.of("eu-central-1")
    yield broker, publishers
    for publisher in publishers.values():
        publisher.close()
    broker.close()


@pytest.fixture
def broker(
    monkeypatch: pytest.MonkeyPatch, _ready: tuple[ScriptedAws, dict[str, AwsPublisher]]
) -> Iterator[ScriptedAws]:
    """Every service; boto3 does not try again by itself."""
    broker = _ready[0]
    monkeypatch.setenv("AWS_ENDPOINT_URL", broker.url)
    attempts(monkeypatch, 1)
    yield broker
    broker.reset()
    for publisher in _ready[1].values():
        publisher._lost.clear()


@pytest.fixture
def make_publisher(broker: ScriptedAws) -> Iterator[Callable[..., AwsPublisher]]:
    """Make a publisher for a kind of destination: make_publisher("sqs", **options)."""
    with ExitStack() as made:

        def make(kind: str, **options: Any) -> AwsPublisher:
            publishers = aws_publishers(**options)
            for publisher in publishers.values():
                made.callback(publisher.close)
            return publishers[kind]

        yield make


@pytest.fixture(params=["sqs", "sns", "eventbridge"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of destination."""
    return str(request.param)


@pytest.fixture
def publisher(broker: ScriptedAws, _ready: tuple[ScriptedAws, dict[str, AwsPublisher]], kind: str) -> AwsPublisher:
    """A publisher for each kind of destination."""
    return _ready[1][kind]


@pytest.fixture
def publishers(broker: ScriptedAws, _ready: tuple[ScriptedAws, dict[str, AwsPublisher]]) -> dict[str, AwsPublisher]:
    """All of them."""
    return _ready[1]
