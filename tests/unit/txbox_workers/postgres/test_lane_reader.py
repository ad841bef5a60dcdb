"""How long a lane reader pauses: short while messages come one by one, longer while they come in numbers."""

from typing import Any

import pytest

from support.txbox.pauses import Pauses
from txbox.relay.poller import NEXT_POLL_SECONDS, NEXT_SECONDS, POLL_SECONDS, PollResult
from txbox.relay.sender import RelayStatements
from txbox_workers.postgres import lane_reader
from txbox_workers.postgres.lane_reader import LaneReader


class Connection:
    """Takes part in nothing here."""

    def detach(self) -> None: ...


def test_pauses_by_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    now, found, wake = 1_000.0, PollResult(), Pauses()

    class Finder:
        due_in_seconds = 60.0

        def __init__(self, *_: object, **__: object) -> None: ...

        def find(self) -> PollResult:
            return found

    class Listener:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> "Listener":
            return self

        def drain(self) -> None: ...

    monkeypatch.setattr(lane_reader, "MessageFinder", Finder)
    monkeypatch.setattr(lane_reader, "Listener", Listener)
    monkeypatch.setattr("txbox_workers.postgres.lane_reader.time.monotonic", lambda: now)
    engine: Any = type("Engine", (), {"connect": lambda _: Connection()})()
    statements: Any = None
    reader = LaneReader(engine, statements, RelayStatements.load(), range(64))

    def pause(count: int, after: float) -> float:
        nonlocal now, found
        now += after
        found = PollResult(fresh=dict.fromkeys(range(count), 1), messages=count)
        reader.find_if_due(now)
        reader.pause(now + 1, now + 1, wake, lambda work: work())
        return wake.seconds[-1]

    assert pause(3, 0) == POLL_SECONDS
    assert pause(1, 0.005) == NEXT_POLL_SECONDS
    assert pause(0, 0.002) == NEXT_POLL_SECONDS
    assert pause(0, NEXT_SECONDS) == POLL_SECONDS
    assert pause(1, 0.1) == NEXT_POLL_SECONDS
    assert pause(2, 0.001) == POLL_SECONDS
