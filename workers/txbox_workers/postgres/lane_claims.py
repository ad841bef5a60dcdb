"""Lane claims: which of a subscriber's lanes this process works on, beside other processes.

Each process that wants messages gets an equal share of the lanes. The claims only save work and keep keys in order from
one process to the next. That a message is processed once does not rest on them, but on the inbox.

::

    A alone       has 64 lanes
    B starts      ── joins ── finds none free ─────────── claims 32
    A             ── counts two: takes nothing more from 32 lanes, finishes what it has of them, releases them
    B is killed   its session ends, and its claims with it
    A             ── counts one ── claims 32

A process that is frozen or cut off loses its claims once its transaction has been idle for ``idle_seconds``.
"""

import random
from collections.abc import Collection

from sqlalchemy import Connection, Engine

from txbox import BrokerError
from txbox.postgres.round_trip import Statement, Step, rows_of, run_steps
from txbox.postgres.transactions import driver_cursor, end_session
from txbox.relay.sender import RelayStatements, array
from txbox_workers.postgres.statements import LaneStatements


class LaneClaims:
    """The claims of one process on the lanes of one destination. Not thread-safe, except for ``owned`` and ``end``."""

    def __init__(
        self, engine: Engine, statements: LaneStatements, relay: RelayStatements, lanes: range, *, idle_seconds: float
    ) -> None:
        """Store the arguments. It connects when it works for the first time."""
        self._engine = engine
        self._statements = statements
        self._lanes = lanes
        self._idle_seconds = f"{idle_seconds:g}"
        self._begin_reading = Step(Statement.of(relay.begin_reading, has_plan=False))
        self._end_reading = Step(Statement.of(relay.end_reading, has_plan=False))
        self._connection: Connection | None = None
        self._is_over = False
        self.joined = False
        self._share = 0
        self.owned: frozenset[int] = frozenset()

    @property
    def surplus(self) -> int:
        """How many lanes to release because others want them."""
        return max(len(self.owned) - self._share, 0)

    def work(self, *, wants: bool, released: Collection[int]) -> None:
        """Release lanes, join or leave those who want messages, and claim what is free of this process's share.

        Raise any error of the driver; ``close`` must follow.
        """
        connection, sql = self._connected(), self._statements
        low = str(self._lanes[0])
        if released:
            self._run(connection, Statement.of(sql.release_lanes).with_values(lanes=array(sorted(released))))
            self.owned -= set(released)
        if wants != self.joined:
            change = sql.join_members if wants else sql.leave_members
            self._run(connection, Statement.of(change).with_values(low=low))
            self.joined = wants
        ((members,),) = self._run(connection, Statement.of(sql.count_members).with_values(low=low))
        if wants:
            self._share = -(-len(self._lanes) // max(members, 1))
        else:  # if nobody else wants them, they may stay
            self._share = len(self.owned) if members == 0 else 0
        if (lacking := self._share - len(self.owned)) > 0:
            others = [lane for lane in self._lanes if lane not in self.owned]
            random.shuffle(others)  # so that those who start together do not try the same ones
            values = {"lanes": array(others), "count": str(lacking)}
            claimed = self._run(connection, Statement.of(sql.claim_lanes).with_values(**values))
            self.owned |= {lane for (lane,) in claimed}

    def close(self) -> None:
        """End the session, and all claims with it."""
        connection, self._connection = self._connection, None
        self.owned, self.joined, self._share = frozenset(), False, 0
        if connection is not None:
            end_session(connection)

    def end(self) -> None:
        """Close for good, even if another thread is about to connect."""
        self._is_over = True
        self.close()

    def _connected(self) -> Connection:
        connection = self._connection
        if connection is None:
            connection = self._engine.connect().execution_options(isolation_level="READ COMMITTED")
            try:
                connection.detach()  # for as long as the worker runs, it is of no use to the pool
                connection.begin()
                begin = Step(Statement.of("BEGIN ISOLATION LEVEL READ COMMITTED", has_plan=False))
                settings = Statement.of(self._statements.begin_claims).with_values(idle_seconds=self._idle_seconds)
                with driver_cursor(connection):
                    run_steps(connection, [begin, settings, self._begin_reading])
            except BaseException:
                end_session(connection)
                raise
            self._connection = connection
            if self._is_over:
                self.close()
                raise BrokerError("the claims have ended")
        return connection

    def _run(self, connection: Connection, step: Step) -> list[tuple[int]]:
        with driver_cursor(connection):
            answer, _ = run_steps(connection, [step, self._end_reading])
        return rows_of(connection, answer)
