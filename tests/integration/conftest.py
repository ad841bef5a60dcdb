"""What integration tests of several packages need: business tables, threads, DynamoDB, short pauses."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest
from sqlalchemy import Engine, create_engine

from support.postgres.engines import NO_HSTORE
from support.workers.business import Business
from support.workers.memory_worker import AT_ONCE
from txbox.backoff import Backoff
from txbox_local import LocalAws
from txbox_workers.options import ValidOptions
from txbox_workers.polling import context
from txbox_workers.processing import processor as processor_module


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def fresh_engine(fresh_database: str) -> Iterator[Engine]:
    """An engine on an empty database, made for one test."""
    engine = create_engine(fresh_database, **NO_HSTORE)
    yield engine
    engine.dispose()


@pytest.fixture
def other_engine(other_schema_url: str) -> Iterator[Engine]:
    """An engine on other tables than those of ``engine``: what is meant for one of them is not in the other."""
    engine = create_engine(other_schema_url, **NO_HSTORE)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def dynamodb(aws: LocalAws) -> Iterator[Any]:
    """A client of the local DynamoDB."""
    client = boto3.client("dynamodb")
    yield client
    client.close()


@pytest.fixture
def business(engine: Engine) -> Business:
    return Business(engine)


@pytest.fixture
def without_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that report nowhere: where the statements or connections of all threads are counted."""
    monkeypatch.setattr(ValidOptions, "report_place", None)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses between tries: while a server cannot be reached, or a message is in flight elsewhere."""
    monkeypatch.setattr(context, "OUTAGE_BACKOFF", Backoff(first_seconds=0.02, longest_seconds=0.1))
    monkeypatch.setattr(processor_module, "IN_FLIGHT_BACKOFF", AT_ONCE)


@pytest.fixture(params=["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def leveled(engine: Engine, request: pytest.FixtureRequest) -> Engine:
    """The engine of a host that prefers this isolation level."""
    return engine.execution_options(isolation_level=request.param)
