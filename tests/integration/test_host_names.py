"""A host may be called anything: no report, lease or record fails for it."""

import socket
from typing import Any

import pytest
from sqlalchemy import Engine

from support.txbox.leases import acquired, dynamodb_store, postgres_store
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from support.workers.memory_worker import at_work, make
from txbox.maintenance import Maintainer
from txbox.relay import Relay
from txbox.text import MAX_HOST_CHARACTERS
from txbox_workers.memory_source import MemorySource


@pytest.fixture(
    params=["caf\udce9", "nul\0", "\U0001f4e8" * 1_000, "h" * 100_000], ids=["not UTF-8", "NUL", "emoji", "very long"]
)
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What Python makes of such a name, and what is kept of it."""
    monkeypatch.setattr(socket, "gethostname", lambda: request.param)
    kept: str = request.param.replace("\udce9", "?").replace("\0", "�")
    return kept[:MAX_HOST_CHARACTERS]


def kept(engine: Engine, sql: str) -> list[str]:
    with engine.connect() as connection:
        return list(connection.exec_driver_sql(sql).scalars())


def test_the_reports_of_workers_relays_and_maintainers(engine: Engine, host: str) -> None:
    services = (
        make(MemorySource(name="queue\0\udce9"), engine),
        Relay(engine, {"own": RecordingPublisher()}),
        Maintainer(engine),
    )
    with at_work(*services):
        for sql in ("SELECT host FROM worker_report", "SELECT host FROM outbox_relay"):
            assert wait_until(lambda sql=sql: kept(engine, sql)) == [host]  # type: ignore[misc]
        (owner,) = wait_until(lambda: kept(engine, "SELECT owner FROM maintenance WHERE task = 'lease'"))
    assert owner.startswith(f"{host} ")


def test_owners_of_leases(engine: Engine, schema_url: str, dynamodb: Any, host: str) -> None:
    for store in (postgres_store(engine, schema_url), dynamodb_store(dynamodb)):
        acquired(store.ledger("mailing"), "m-1")
    (owner,) = kept(engine, "SELECT owner FROM message_lease")
    assert owner.startswith(f"{host} ")
