"""The examples run as processes of their own: the billing service against the servers of the tests, the others as their
READMEs say."""

import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from sqlalchemy import create_engine, text

from support.documents import EXAMPLES, run_readme
from support.waiting import wait_until
from txbox_local import LocalAws

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

pytestmark = pytest.mark.slow  # `make test-pages` runs them, as does CI

SERVICE = EXAMPLES / "billing_service"

POSTED = [("p-1", "ann", 2500), ("p-2", "ann", 1999), ("p-1", "ann", 2500), ("p-3", "bob", 100), ("p-3", "bob", 100)]


@pytest.fixture
def environment(fresh_database: str, aws: LocalAws, queue: str) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        **os.environ,
        **aws.environment(),
        "TXBOX_DATABASE_URL": fresh_database,
        "QUEUE_NAME": queue.rpartition("/")[2],
        "PORT": str(port),
        "PYTHONPATH": str(SERVICE),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


class Service:
    """The running service, and a client for it."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "billing_service"], cwd=SERVICE, env=environment, stdout=output, stderr=output
            )
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{environment['PORT']}", timeout=10, trust_env=False)
        wait_until(self._answers, "the service answers", timeout=60)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.client.get("/health").status_code == 200
        except httpx2.ConnectError:
            return False

    def post(self, key: str, account_id: str, cents: int) -> None:
        answer = self.client.post(
            "/purchases", json={"account_id": account_id, "cents": cents}, headers={"Idempotency-Key": key}
        )
        assert answer.status_code == 202, answer.text

    def account(self, account_id: str) -> dict[str, Any] | None:
        answer = self.client.get(f"/accounts/{account_id}")
        return answer.json() if answer.status_code == 200 else None

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def migrated(environment: dict[str, str]) -> None:
    alembic(environment, "upgrade", "head")


@pytest.fixture
def service(environment: dict[str, str], migrated: None, tmp_path: Path) -> Iterator[Service]:
    service = Service(environment, tmp_path / "service.log")
    yield service
    service.close()


def alembic(environment: dict[str, str], *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=SERVICE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_what_is_posted_twice_is_added_once_and_without_a_key_refused(
    service: Service, environment: dict[str, str], sqs: "SQSClient", queue: str
) -> None:
    for key, account_id, cents in POSTED:
        service.post(key, account_id, cents)
    without_a_key = service.client.post("/purchases", json={"account_id": "ann", "cents": 1})
    assert without_a_key.status_code == 400
    again = service.client.post(
        "/purchases", json={"account_id": "ann", "cents": 2500}, headers={"Idempotency-Key": "p-1"}
    )
    assert again.headers["idempotent-replayed"] == "true"
    wait_until(lambda: is_sent(environment) and is_empty(sqs, queue), "every delivery is acked")
    assert service.account("ann") == {"account_id": "ann", "purchases": 2, "cents": 4499}
    assert service.account("bob") == {"account_id": "bob", "purchases": 1, "cents": 100}
    assert service.account("cid") is None
    assert recorded(environment) == ["p-1", "p-2", "p-3"]


def test_sigterm_drains_and_the_next_one_finishes(
    service: Service, environment: dict[str, str], sqs: "SQSClient", queue: str, tmp_path: Path
) -> None:
    expected: Counter[str] = Counter()
    for number in range(60):
        service.post(f"p-{number}", f"account-{number % 3}", number)
        expected[f"account-{number % 3}"] += number
    assert service.stop() == 0, service.log.read_text()
    said = service.log.read_text()
    assert "billing stopped\n" in said, said
    # Nothing is left in the hands of a worker that is gone: what was taken is acked or handed back.
    assert in_the_hands_of_workers(sqs, queue) == 0

    service.client.close()
    successor = Service(environment, tmp_path / "successor.log")
    try:
        wait_until(lambda: is_sent(environment) and is_empty(sqs, queue), "every delivery is acked")
        for account_id, cents in expected.items():
            assert successor.account(account_id) == {"account_id": account_id, "purchases": 20, "cents": cents}
        assert successor.stop() == 0, successor.log.read_text()
    finally:
        successor.close()


def test_its_migrations_go_up_and_down_and_autogenerate_proposes_nothing(environment: dict[str, str]) -> None:
    alembic(environment, "upgrade", "head")
    assert "No new upgrade operations detected" in alembic(environment, "check")
    alembic(environment, "downgrade", "base")
    assert tables(environment) == ["alembic_version"]
    alembic(environment, "upgrade", "head")
    assert {"account", "processed_message", "dead_letter", "message_failure"} < set(tables(environment))


def is_sent(environment: dict[str, str]) -> bool:
    return query(environment, "SELECT message_id FROM outbox_message") == []


def is_empty(sqs: "SQSClient", queue: str) -> bool:
    return set(attributes(sqs, queue).values()) == {"0"}


def in_the_hands_of_workers(sqs: "SQSClient", queue: str) -> int:
    return int(attributes(sqs, queue)["ApproximateNumberOfMessagesNotVisible"])


def attributes(sqs: "SQSClient", queue: str) -> dict[str, str]:
    names: Any = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    return dict(sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=names)["Attributes"])


def recorded(environment: dict[str, str]) -> list[str]:
    return query(environment, "SELECT message_id FROM processed_message WHERE subscriber_id = 'shop' ORDER BY 1")


def tables(environment: dict[str, str]) -> list[str]:
    return query(environment, "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename")


def query(environment: dict[str, str], sql: str) -> list[str]:
    engine = create_engine(environment["TXBOX_DATABASE_URL"])
    try:
        with engine.connect() as connection:
            return list(connection.execute(text(sql)).scalars())
    finally:
        engine.dispose()


@pytest.mark.timeout(600)  # servers of their own, and a JVM for each command of the bulk load
@pytest.mark.parametrize("name", ["bulk_load", "django_billing", "order_service"])
def test_what_the_readme_of_an_example_shows_works(name: str, tmp_path: Path) -> None:
    run_readme(name, tmp_path)
