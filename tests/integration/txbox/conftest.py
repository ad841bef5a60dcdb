"""Inboxes of one subscriber; relays, and what is left of their outbox."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from txbox import Inbox
from txbox.backoff import Backoff
from txbox.relay import Publisher, Relay

QUICK = Backoff(first_seconds=0.02, longest_seconds=0.05)

StartRelay = Callable[..., Relay]


@pytest.fixture
def inbox() -> Inbox:
    """An inbox whose waits outlast every test: who runs into the bound without meaning to fails."""
    return Inbox("billing", wait_seconds=60)


@pytest.fixture
def start_relay(engine: Engine) -> Iterator[StartRelay]:
    """Start a relay with a publisher for ``own:``, and see that it stops: start_relay(publisher, **options)."""
    relays: list[Relay] = []

    def start(publisher: Publisher, *, engine: Engine = engine, **options: Any) -> Relay:
        relay = Relay(engine, {"own": publisher}, **{"backoff": QUICK, **options})
        relay.start()
        relays.append(relay)
        return relay

    yield start
    for relay in relays:
        assert relay.stop(20)


@pytest.fixture
def left(engine: Engine) -> Callable[[], list[str]]:
    """The bodies that are still in the outbox, read without any code under test."""

    def read() -> list[str]:
        with engine.connect() as connection:
            found = connection.exec_driver_sql("SELECT body FROM outbox_message ORDER BY position")
            return [bytes(row[0]).decode() for row in found]

    return read
