"""What the acceptance tests of the demo share: a run of their own, and what runs leave on the servers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from sqlalchemy import Engine, create_engine

from txbox_demo import supervisor
from txbox_demo.checker import DemoReport
from txbox_demo.run import Plan, run_demo

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

    from txbox_local import LocalAws


class Left(NamedTuple):
    """What demos have left on the servers."""

    schemas: list[str]
    queues: list[str]


@pytest.fixture
def on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo finds no servers in the environment."""
    for name in ("TXBOX_DATABASE_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SQS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def admin(database_url: str) -> Iterator[Engine]:
    engine = create_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def left(admin: Engine, sqs: "SQSClient") -> Callable[[], Left]:
    """Look for what demos have left: left()."""

    def look() -> Left:
        with admin.connect() as connection:
            found = connection.exec_driver_sql("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'txbox_demo_%%'")
            schemas = list(found.scalars())
        return Left(schemas, sqs.list_queues(QueueNamePrefix="txbox-demo-").get("QueueUrls", []))

    return look


@pytest.fixture
def run_quickly(
    database_url: str, aws: "LocalAws", monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., DemoReport]:
    """Run a small demo in this process, in which what is lost is given up sooner: run_quickly(purchases, kills=0).

    ``seen_by``: what ``run_demo`` takes beside its plan.
    """
    monkeypatch.setattr(supervisor, "LOST_SECONDS", 2.0)
    monkeypatch.setenv("AWS_TEST_NOTES", str(tmp_path))  # every process of the demo gets variables of this kind

    def run(purchases: int, *, seen_by: dict[str, Any] | None = None, **changes: Any) -> DemoReport:
        settings: dict[str, Any] = {"workers": 2, "kills": 0, "seed": 1, "database_url": database_url}
        return run_demo(Plan(purchases, own_broker=False, **(settings | changes)), **(seen_by or {}))

    return run
