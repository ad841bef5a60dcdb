"""The pytest plugin: fixtures for tests of handlers, all of them named ``txbox_…``.

Every pytest of an environment that has txbox loads this file, so it imports nothing but pytest: the rest is imported
with the first fixture that a test uses. All fixtures are plain ones, which tests of any kind can use, those of
pytest-asyncio and anyio too. Each process of pytest-xdist has servers of its own, which end with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from txbox import Inbox
    from txbox_local import LocalAws
    from txbox_testing import Delivered, RelayedMessages, TrialReport

EMBEDDED = "embedded"

HELP = (
    "the Postgres of txbox's fixtures: 'embedded' (from txbox[embedded]), an image such as postgres:17 (a container, "
    "by testcontainers), or the URL of a server on which databases may be created"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting ``txbox_postgres``, and ``--txbox-postgres``, which overrides it."""
    parser.addini("txbox_postgres", HELP, default=EMBEDDED)
    parser.getgroup("txbox").addoption("--txbox-postgres", metavar="SERVER", help=HELP)


@pytest.fixture(scope="session")
def txbox_postgres(pytestconfig: pytest.Config) -> Iterator[str]:
    """The URL of a Postgres on which tests may create databases. See the setting ``txbox_postgres``."""
    from txbox_testing.servers import postgres

    with postgres(pytestconfig.getoption("txbox_postgres") or pytestconfig.getini("txbox_postgres")) as url:
        yield url


@pytest.fixture(scope="session")
def txbox_prepare() -> Callable[[Engine], object]:
    """A function that creates your tables in a database with those of txbox. Override it.

    It is called once, with an engine. What it creates is copied for every test.
    """
    return lambda _engine: None


@pytest.fixture(scope="session")
def txbox_template(txbox_postgres: str, txbox_prepare: Callable[[Engine], object]) -> Iterator[str]:
    """The URL of the database copied for each test: txbox's tables, and what ``txbox_prepare`` creates."""
    from txbox_testing.servers import template

    with template(txbox_postgres, txbox_prepare) as url:
        yield url


@pytest.fixture
def txbox_database(txbox_template: str) -> Iterator[str]:
    """The URL of this test's own database, with txbox's tables and yours."""
    from txbox_testing.servers import copied

    with copied(txbox_template) as url:
        yield url


@pytest.fixture
def txbox_engine(txbox_database: str) -> Iterator[Engine]:
    """An engine on this test's own database. Override it to have the other fixtures use yours."""
    from sqlalchemy import create_engine

    engine = create_engine(txbox_database)
    yield engine
    engine.dispose()


@pytest.fixture
def txbox_inbox() -> Inbox:
    """The inbox of this test's subscriber, ``test``. Override it to have the other fixtures use yours."""
    from txbox import Inbox

    return Inbox("test")


@pytest.fixture
def txbox_deliver(txbox_engine: Engine, txbox_inbox: Inbox) -> Callable[..., Delivered]:
    """``txbox_testing.deliver`` with this test's engine and inbox: ``txbox_deliver(handler, message)``."""
    from txbox_testing import deliver

    return partial(deliver, engine=txbox_engine, inbox=txbox_inbox)


@pytest.fixture
def txbox_trial(txbox_engine: Engine, txbox_inbox: Inbox) -> Callable[..., TrialReport]:
    """``txbox_testing.try_every_point`` with this test's engine and inbox: ``txbox_trial(handler, message)``."""
    from txbox_testing import try_every_point

    return partial(try_every_point, engine=txbox_engine, inbox=txbox_inbox)


@pytest.fixture
def txbox_relay(txbox_engine: Engine) -> Callable[..., RelayedMessages]:
    """``txbox_testing.relay`` with this test's engine: ``txbox_relay({"own": publisher})``."""
    from txbox_testing import relay

    return partial(relay, engine=txbox_engine)


@pytest.fixture
def txbox_load(txbox_engine: Engine) -> Callable[..., Any]:
    """``txbox_testing.load`` with this test's engine: ``txbox_load(load, fault=crash_at("merging", 2))``."""
    from txbox_testing import load

    return partial(load, engine=txbox_engine)


@pytest.fixture
def txbox_load_trial(txbox_engine: Engine) -> Callable[..., TrialReport]:
    """``txbox_testing.try_every_point_of_load`` with this test's engine: ``txbox_load_trial(load)``."""
    from txbox_testing import try_every_point_of_load

    return partial(try_every_point_of_load, engine=txbox_engine)


@pytest.fixture(scope="session")
def txbox_aws_server() -> Iterator[LocalAws]:
    """A local AWS, from ``txbox[embedded]``. Nothing points to it by itself."""
    from txbox_local import LocalAws

    with LocalAws() as server:
        yield server


@pytest.fixture
def txbox_aws(txbox_aws_server: LocalAws, monkeypatch: pytest.MonkeyPatch) -> LocalAws:
    """The local AWS. boto3's variables point to it during the test."""
    for name, value in txbox_aws_server.environment().items():
        monkeypatch.setenv(name, value)
    return txbox_aws_server


@pytest.fixture
def txbox_sqs(txbox_aws: LocalAws) -> Iterator[Any]:  # noqa: ARG001 - it sets boto3's variables
    """A boto3 client of the local SQS. It also needs ``txbox[aws]``."""
    from txbox_aws.clients import SQS, make_client

    with contextlib.closing(make_client(SQS)) as client:
        yield client


@pytest.fixture
def txbox_queue(txbox_sqs: Any) -> str:
    """The URL of this test's own standard queue."""
    import uuid

    from txbox_aws.sqs import create_queue

    return create_queue(f"test-{uuid.uuid4().hex[:12]}", client=txbox_sqs)
