"""Relays with async publishers, and what ends a call of theirs that hangs."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

from support.postgres.engines import NO_HSTORE
from support.postgres.statements import run
from support.txbox.publishers import AsyncRecorder, RecordingPublisher
from txbox.backoff import Backoff
from txbox.relay import Relay, async_publishers, async_sender, async_settler, poller, scheduler

StartBoth = Callable[..., Relay]


def refuse_settlements(engine: Engine, condition: str = "true") -> None:
    """Have the database refuse to settle messages, all or those of a condition."""
    run(
        engine,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$;"
        "CREATE TRIGGER refuse BEFORE DELETE ON outbox_message FOR EACH ROW "
        f"WHEN ({condition}) EXECUTE FUNCTION refuse()",
    )


def allow_settlements(engine: Engine) -> None:
    run(engine, "DROP FUNCTION refuse CASCADE")


@pytest.fixture(autouse=True)
def _fewer_polls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll now and then: 300 in a second keep a core busy."""
    if "all_polls" not in request.fixturenames:
        monkeypatch.setattr(poller, "POLL_SECONDS", 0.015)
        monkeypatch.setattr(poller, "NEXT_SECONDS", 0.0)


@pytest.fixture
def all_polls() -> None:
    """As many polls as a relay makes: for what depends on when it looks."""


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses between tries, while a publisher or the database cannot be reached."""
    for module in (scheduler, poller, async_sender, async_settler):
        monkeypatch.setattr(module, "OUTAGE_BACKOFF", Backoff(first_seconds=0.05, longest_seconds=1.0))
    monkeypatch.setattr(async_publishers, "ENTER_BACKOFF", Backoff(first_seconds=0.05, longest_seconds=1.0))


@pytest.fixture
def freed() -> Iterator[threading.Event]:
    """Ends what hangs; at the end of the test, too."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def start_both(engine: Engine, freed: threading.Event) -> Iterator[StartBoth]:
    """Start a relay with an async publisher for ``far:``, another for ``own:``, and an engine of the default pool."""
    relays: list[Relay] = []
    pooled = create_engine(engine.url, **NO_HSTORE)

    def start(
        far: AsyncRecorder,
        own: RecordingPublisher | None = None,
        *,
        engine: Engine = pooled,
        others: Mapping[str, AsyncRecorder] = {},
        **options: Any,
    ) -> Relay:
        publishers = {"far": far, **others} if own is None else {"far": far, "own": own, **others}
        relays.append(Relay(engine, publishers, backoff=Backoff(0.02, 0.05), **options))
        relays[-1].start()
        return relays[-1]

    yield start
    freed.set()
    for relay in relays:
        assert relay.stop(20)
    pooled.dispose()
