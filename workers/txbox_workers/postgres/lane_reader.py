"""The connection over which one thread at a time finds and reads the messages of a subscriber."""

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Engine

from txbox.postgres.round_trip import Statement, Step, rows_of, run_steps
from txbox.postgres.transactions import driver_cursor, end_session
from txbox.relay.poller import (
    AWAKE_SECONDS,
    NEXT_POLL_SECONDS,
    NEXT_SECONDS,
    POLL_SECONDS,
    Listener,
    MessageFinder,
    PollResult,
)
from txbox.relay.sender import RelayStatements, array
from txbox_workers.postgres.backlog import LaneOrigin, WaitingMessage
from txbox_workers.postgres.statements import LaneStatements

READ_BYTES = 8 * 1024 * 1024
"""The bodies that are read at once, at most, but one message of any size."""

IDLE_SECONDS = 1.0
"""Least time between searches while no messages come; a notification ends the wait."""

FIND_SECONDS = 0.05
"""Least time between searches for what is new while there is enough to read."""

BEGUN_AHEAD = 2_000
"""How far ahead the mark of what may have been begun is set: a write for each so many messages."""


class LaneReader:
    def __init__(self, engine: Engine, statements: LaneStatements, relay: RelayStatements, lanes: range) -> None:
        self._statements = statements
        self._find_at = self._awake_until = self._single_at = self._drain_at = -math.inf
        self._begun_to: dict[int, int] = {}
        self._begin = Step(Statement.of("BEGIN ISOLATION LEVEL READ COMMITTED", has_plan=False))
        self._commit = Step(Statement.of("COMMIT", has_plan=False))
        self._plan = Statement.of(relay.set_plan).with_values()
        self._connection: Connection = engine.connect()
        try:
            self._finder = MessageFinder(self._connection, relay, lanes=lanes)
            self._connection.detach()  # for as long as the worker runs, it is of no use to the pool
            self._listener = Listener(engine, relay, wanted=True).__enter__()
        except BaseException:
            end_session(self._connection)
            raise

    def close(self) -> None:
        """Close the connections."""
        end_session(self._connection)
        self._listener.__exit__(None, None, None)

    def find_if_due(self, now: float) -> PollResult | None:
        """Find what is new, unless that was done just now."""
        if now < self._find_at:
            return None
        if now >= self._drain_at:
            self._listener.drain()
            self._drain_at = now + AWAKE_SECONDS
        found = self._finder.find()
        if found.fresh or found.woken:
            self._awake_until = now + AWAKE_SECONDS
            self._single_at = now if found.messages == 1 else -math.inf
        idle = min(IDLE_SECONDS, max(self._finder.due_in_seconds, POLL_SECONDS))
        self._find_at = now + (FIND_SECONDS if now < self._awake_until else idle)
        return found

    def pause(
        self, deadline: float, due: float, wake: threading.Event, call: Callable[[Callable[[], Any]], Any]
    ) -> None:
        """Wait until it is worth looking again."""
        now = time.monotonic()
        if now < self._awake_until:
            wake.wait(NEXT_POLL_SECONDS if now < self._single_at + NEXT_SECONDS else POLL_SECONDS)
            self._find_at = -math.inf
            return
        seconds = min(self._find_at, deadline, due) - now
        if seconds > 0 and call(lambda: self._listener.wait(seconds, wake)):
            self._awake_until, self._find_at = time.monotonic() + AWAKE_SECONDS, -math.inf

    def origins(self, lanes: Collection[int]) -> dict[int, LaneOrigin]:
        """Return how far lanes that were just claimed had been worked on."""
        step = Statement.of(self._statements.take_over).with_values(lanes=array(sorted(lanes)))
        return {lane: LaneOrigin(begun_to, before) for lane, begun_to, before in self._rows(step)}

    def heads(self, lanes: Collection[int]) -> list[tuple[int, int, str, float]]:
        """Return the failed messages of these lanes that hold keys: lane, position, key, in how many seconds due."""
        step = Statement.of(self._statements.held_heads).with_values(lanes=array(sorted(lanes)))
        return self._rows(step) if lanes else []

    def read(self, wanted: Mapping[int, int], each_limit: int) -> tuple[list[WaitingMessage], bool]:
        """Read from these positions of these lanes on; return also whether there was more than was returned."""
        values = {"each_limit": str(each_limit), "bytes_limit": str(READ_BYTES)}
        places = {"lanes": array(wanted), "positions": array(wanted.values())}
        rows = self._rows(Statement.of(self._statements.read_lanes).with_values(**places, **values))
        return [WaitingMessage._make(row[:-2]) for row in rows], bool(rows) and rows[0][-2] > len(rows)

    def read_again(self, wanted: Mapping[int, int]) -> list[WaitingMessage]:
        """Read these positions, each with its lane."""
        places = {"lanes": array(wanted.values()), "positions": array(wanted)}
        return [
            WaitingMessage._make(row)
            for row in self._rows(Statement.of(self._statements.read_again).with_values(**places))
        ]

    def mark_begun(self, rows: Sequence[WaitingMessage], lanes: Collection[int]) -> None:
        """Record that these messages may be begun, and for a while those behind them in all of these lanes."""
        if all(row.position <= self._begun_to.get(row.lane, 0) for row in rows):
            return
        ahead = max(row.position for row in rows) + BEGUN_AHEAD
        values = {"lanes": array(sorted(lanes)), "position": str(ahead)}
        step = Statement.of(self._statements.mark_begun).with_values(**values)
        self._run([Statement.of(self._statements.async_commit).with_values(), step])
        self._begun_to = dict.fromkeys(lanes, ahead)

    def unmarked(self, lanes: Collection[int]) -> None:
        """Forget that messages of these lanes were marked."""
        self._begun_to = {lane: at for lane, at in self._begun_to.items() if lane not in lanes}

    def _rows(self, step: Step) -> list[Any]:
        return rows_of(self._connection, self._run([self._plan, step])[-1])

    def _run(self, steps: Sequence[Step]) -> list[Any]:
        with driver_cursor(self._connection):
            return run_steps(self._connection, [self._begin, *steps, self._commit])[1:-1]
