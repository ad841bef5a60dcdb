"""Inboxes of one subscriber; relays, and what is left of their outbox."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from support.txbox.publishers import Awaited
from txbox import Inbox
from txbox.backoff import Backoff
from txbox.relay import Publisher, Relay

QUICK = Backoff(first_seconds=0.02, longest_seconds=0.05)

StartRelay = Callable[..., Relay]
Left = Callable[[], list[str]]

BOTH_KINDS = pytest.mark.parametrize("start_relay", ["sync", "async"], indirect=True)


@pytest.fixture
def inbox() -> Inbox:
    """An inbox whose waits outlast every test: who runs into the bound without meaning to fails."""
    return Inbox("billing", wait_seconds=60)


@pytest.fixture
def start_relay(engine: Engine, request: pytest.FixtureRequest) -> Iterator[StartRelay]:
    """Start a relay with a publisher for ``own:``, and see that it stops: start_relay(publisher, **options).

    ``BOTH_KINDS`` has a test run with publishers as they are, and with their calls awaited.
    """
    awaited = getattr(request, "param", "sync") == "async"
    relays: list[Relay] = []

    def start(publisher: Publisher, *, engine: Engine = engine, **options: Any) -> Relay:
        own = Awaited(publisher) if awaited else publisher
        relay = Relay(engine, {"own": own}, **{"backoff": QUICK, **options})
        relay.start()
        relays.append(relay)
        return relay

    yield start
    for relay in relays:
        assert relay.stop(20)


@pytest.fixture
def left(engine: Engine) -> Left:
    """The bodies that are still in the outbox, read without any code under test."""

    def read() -> list[str]:
        with engine.connect() as connection:
            found = connection.exec_driver_sql("SELECT body FROM outbox_message ORDER BY position")
            return [bytes(row[0]).decode() for row in found]

    return read
