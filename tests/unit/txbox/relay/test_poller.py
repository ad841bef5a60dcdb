"""How long the poller pauses: short while messages come one by one, longer while they come in numbers or not at all."""

from typing import Any

import pytest
from sqlalchemy import create_engine

from support.txbox.pauses import Pauses
from txbox.relay.poller import NEXT_POLL_SECONDS, NEXT_SECONDS, POLL_SECONDS, SENDING_SECONDS, OutboxPoller, PollResult
from txbox.relay.reporter import RelayReporter
from txbox.relay.scheduler import Scheduler
from txbox.relay.sender import RelayStatements


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000.0]
    monkeypatch.setattr("txbox.relay.poller.time.monotonic", lambda: now[0])
    return now


def one(count: int) -> PollResult:
    return PollResult(fresh=dict.fromkeys(range(count), 1), messages=count)


def test_pauses_by_what_was_found(clock: list[float]) -> None:
    stopping, found = Pauses(), PollResult()

    class Finder:
        due_in_seconds = 60.0

        def find(self, **_: object) -> PollResult:
            return found

    class Listener:
        def drain(self) -> None: ...

    finder: Any = Finder()
    listener: Any = Listener()
    statements = RelayStatements.load()
    this = OutboxPoller(
        create_engine("postgresql+psycopg://"),
        statements,
        Scheduler(100),
        RelayReporter("r", statements, None),
        listen=False,
        stopping=stopping,
        counts=lambda: (0, 0),
        on_poll=lambda: None,
        on_pauses=lambda _: None,
        emit=lambda _: None,
    )

    def pause(result: PollResult, after: float) -> float:
        nonlocal found
        found = result
        clock[0] += after
        this._poll(finder)
        this._pause(finder, listener)
        return stopping.seconds[-1]

    assert pause(one(3), 0) == POLL_SECONDS
    assert pause(one(1), 0.005) == pytest.approx(SENDING_SECONDS)
    assert pause(PollResult(), 0.002) == NEXT_POLL_SECONDS
    assert pause(PollResult(), NEXT_SECONDS) == POLL_SECONDS
    assert pause(one(1), 0.1) == pytest.approx(SENDING_SECONDS)
    assert pause(one(2), 0.001) == POLL_SECONDS
    assert pause(PollResult(), 0.001) == POLL_SECONDS
