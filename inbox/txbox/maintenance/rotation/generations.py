"""Generations of a rotating inbox: the newest records ids, the older ones are only read, the oldest is dropped.

A rotating inbox is the table ``processed_message`` in partitions, each with the same primary key as the single table.
``txbox db rotate-inbox`` converts it (``txbox.maintenance.rotation.conversion``). An id is recorded in the newest
partition unless the view ``processed_earlier`` has it in one of the others (``inbox.sql``).

A rotation is one transaction, behind a lock that conflicts with every transaction that records::

    A records in 1 ───────────── A commits
         R waits for the lock ────────────┘ makes 2, the default, and the view of 1 ── R commits
              B waits behind R ───────────────────────────────────────────────────────────────┘ records in 2

B is planned and takes its snapshot behind its locks, so it sees what A has recorded. A bulk load's chunk looks for its
ids and then inserts them, and holds the lock from one to the other. R waits at most ``LOCK_MS`` at a time, and so does
B. That is too short for a deadlock to be found that would end someone else's transaction; a long transaction only
postpones the rotation.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from txbox.backoff import Backoff, retry
from txbox.errors import InvalidConfiguration
from txbox.inbox.age_judge import PRODUCER_SLACK
from txbox.maintenance.horizons import Horizons
from txbox.maintenance.transactions import MaintenanceStatements, MaintenanceTransactions, is_contended
from txbox.postgres.engines import adopt
from txbox.postgres.server import SERVER
from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import short_transaction

LOCK_MS = 80
"""How long one try waits for the exclusive lock; recording waits behind it. Less than deadlock_timeout."""

TRIES = 30
"""How often the lock is tried."""

AGAIN = Backoff(first_seconds=0.05, longest_seconds=2.0)
"""The pauses between the tries."""

MOST_GENERATIONS = 24
"""Recording locks each generation and its key, and by default Postgres has room for 64 locks per connection."""

MOVED_AT_ONCE = 500
"""Rows of parked messages that one transaction moves."""

POLL_SECONDS = 0.2
"""Seconds between two looks at the running transactions."""

ROTATION_TRIES = 5
"""How often one round tries to lock a rotating inbox; the next round tries again."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of a rotating inbox.

    Attributes:
        generation: its number.
        opened_at: when recording into it began; the first one also has earlier ids.
        closed_at: when recording into it ended; None: it is the current one.
        rows: by the planner's estimate.
        bytes: including the primary key.
    """

    generation: int
    opened_at: datetime
    closed_at: datetime | None
    rows: int
    bytes: int


class GenerationStatements(SqlFile, file="generations.sql"):
    rotates: str
    generations: str
    rotate: str
    forgettable: str
    move_parked: str
    name_generation: str
    detach_generation: str
    drop_detached: str
    detached: str


class Generations:
    """The generations of one inbox. Changing them needs the rights of the tables' owner."""

    def __init__(
        self,
        engine: Engine,
        *,
        schema: str | None = None,
        prefix: str = "",
        wait: Callable[[float], bool | None] = time.sleep,
    ) -> None:
        """Store where the tables are.

        Args:
            engine: where short transactions are opened.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
            wait: pauses for this many seconds; returns whether to give up.
        """
        self._engine = adopt(engine)
        self._sql = GenerationStatements.load(schema, prefix)
        self._maintenance_sql = MaintenanceStatements.load(schema, prefix)
        self._wait = wait

    def rotating(self) -> bool:
        """Return whether the inbox rotates; False if it is one table."""
        with short_transaction(self._engine) as connection:
            return bool(connection.exec_driver_sql(self._sql.rotates).scalar_one_or_none())

    def list(self) -> "list[Generation]":
        """Return the generations, oldest first; none if the inbox is one table."""
        with short_transaction(self._engine) as connection:
            rows = connection.exec_driver_sql(self._sql.generations).mappings()
            return [Generation(**with_moments(row, "opened_at", "closed_at")) for row in rows]

    def rotate(self, *, tries: int = TRIES, most: int = MOST_GENERATIONS) -> bool:
        """Open a new generation, into which ids are recorded from now on.

        Args:
            tries: how often the lock is tried.
            most: how many generations there may be.

        Returns:
            False if transactions that use the inbox did not end in time, or there are already that many generations.
            Nothing has changed; try again later.

        Raises:
            DBAPIError: as the database raised it; 55000: the inbox does not rotate.
        """
        if (count := len(self.list())) >= most:
            _log.warning(
                "%s has %d generations, and more would slow recording down: no new one is opened, the current one goes "
                "on. Forget old ones: give every subscriber a window (txbox maintain), and rotate less often",
                self._sql.name_of("processed_message"),
                count,
            )
            return False
        return self.exclusively(lambda connection: connection.exec_driver_sql(self._sql.rotate), tries=tries)

    def settle(self, *, seconds: float) -> Mapping[str, float]:
        """Read the horizons, wait until every running transaction sees them, and return them for ``forget``.

        A horizon that moves during the wait does not count: a transaction that began meanwhile may not see it::

            horizons are read ── waits for A ─────────── returns the horizons that were read
            A ──────────────────────────── A ends
                                 B begins ─────────────────── records by its old snapshot
                                    a horizon moves

        Whatever committed before the transactions are listed is in the snapshot of every later one; CREATE INDEX
        CONCURRENTLY relies on the same. A VACUUM is not waited for.

        Args:
            seconds: how long to wait at most.

        Returns:
            The horizons by subscriber, in seconds since 1970. None of them if a transaction still runs after
            ``seconds``; the log names its server process.

        Raises:
            DBAPIError: as the database raised it.
        """
        with short_transaction(self._engine) as connection:
            found = connection.exec_driver_sql(self._maintenance_sql.horizons)
            horizons = {one.subscriber_id: one.seconds for one in found}
        until = time.monotonic() + seconds
        with short_transaction(self._engine) as connection:
            older = list(connection.exec_driver_sql(SERVER.running_transactions).scalars())
        while older:
            with short_transaction(self._engine) as connection:
                looked_for = {"virtualxids": older}
                running = connection.exec_driver_sql(self._maintenance_sql.still_running, looked_for).all()
            older = [one.virtualxid for one in running]
            if older and (time.monotonic() >= until or self._wait(POLL_SECONDS)):
                _log.warning(
                    "transactions that began before the horizons were read are still running, so no horizon counts; "
                    "end them, or wait longer: server processes %s",
                    ", ".join(str(one.pid) for one in running[:5]),
                )
                return {}
        return horizons

    def forget(
        self, *, settled: Mapping[str, float], slack: timedelta = PRODUCER_SLACK, tries: int = TRIES
    ) -> tuple[int, ...]:
        """Drop every generation whose ids all lie behind their subscribers' horizons; return the numbers dropped.

        A generation is detached from the inbox under a lock that is held for a moment, and its files are removed
        afterwards. If that is interrupted between the two, the next call drops the table.

        Before that, rows of letters that wait, and of letters discarded since the horizon, are moved into the current
        generation. A generation whose lock cannot be had, or whose letters are being redriven, is left for the next
        time.

        Only horizons that every running transaction sees count. A transaction whose snapshot is older than a horizon
        sees neither the horizon nor the id, and would run the message again.

        Args:
            settled: the horizons that ``settle`` returned; those in the database may have moved since.
            slack: by how much the clocks of a sender and of the database may differ.
            tries: how often the lock is tried for each generation.

        Raises:
            InvalidConfiguration: ``settled`` is no mapping.
            DBAPIError: as the database raised it.
        """
        if not isinstance(settled, Mapping):
            raise InvalidConfiguration(f"settled must be what Generations.settle returned, not {settled!r}")
        with short_transaction(self._engine) as connection:
            if not connection.exec_driver_sql(self._sql.rotates).scalar_one_or_none():
                return ()
            wanted = {"slack_seconds": slack.total_seconds(), "settled": json.dumps(dict(settled))}
            found = list(connection.exec_driver_sql(self._sql.forgettable, wanted))
        self.drop_detached(tries=tries)
        return tuple(generation for generation, closed_at in found if self._forget(generation, closed_at, tries))

    def exclusively(self, change: Callable[[Connection], object], *, tries: int = TRIES) -> bool:
        """Run a change that takes the inbox's exclusive lock, in its own transaction; return False if it is busy.

        Args:
            change: runs again from its start after a lock timeout or a deadlock.
            tries: how often it runs at most.
        """

        def work() -> None:
            with short_transaction(self._engine) as connection:
                connection.exec_driver_sql(SERVER.bound_wait, {"lock_timeout": f"{LOCK_MS}ms"})
                change(connection)

        try:
            retry(work, again=lambda error, _: is_contended(error), backoff=AGAIN, runs=tries, wait=self._wait)
        except DBAPIError as error:
            if not is_contended(error):
                raise
            _log.info("the inbox is in use, and was not locked in %d tries: %s", tries, str(error.orig).splitlines()[0])
            return False
        return True

    def move_parked(self, generation: int) -> int:
        """Move rows of letters that wait into the current generation, in one transaction; return how many."""
        moved = {"generation": generation, "most": MOVED_AT_ONCE}
        with short_transaction(self._engine) as connection:
            return connection.exec_driver_sql(self._sql.move_parked, moved).rowcount

    def drop_detached(self, *, tries: int = TRIES) -> tuple[int, ...]:
        """Drop the tables of detached generations, and return their numbers.

        Args:
            tries: how often each lock is tried; a table that somebody reads is left for the next time.
        """
        with short_transaction(self._engine) as connection:
            detached = tuple(connection.exec_driver_sql(self._sql.detached).scalars())
        for _ in detached:
            self.exclusively(lambda connection: connection.exec_driver_sql(self._sql.drop_detached), tries=tries)
        return detached

    def drop(self, generation: int, closed_at: int, *, tries: int = TRIES) -> bool:
        """Detach a closed generation from the inbox and drop it; return False if its lock could not be had.

        Args:
            generation: its number. If rows of letters that wait are in it, it stays; all its other rows go with it.
            closed_at: when it was closed, in microseconds since 1970; a younger generation of this number stays.
            tries: how often the lock is tried.
        """

        def detach(connection: Connection) -> None:
            connection.exec_driver_sql(self._sql.name_generation, {"generation": generation, "closed_at": closed_at})
            connection.exec_driver_sql(self._sql.detach_generation)

        return self.exclusively(detach, tries=tries) and generation in self.drop_detached(tries=tries)

    def _forget(self, generation: int, closed_at: int, tries: int) -> bool:
        while self.move_parked(generation):
            pass
        return self.drop(generation, closed_at, tries=tries)


class Rotator:
    """The task that rotates an inbox: opens a generation when one is due, and drops those that are forgotten."""

    def __init__(
        self,
        engine: Engine,
        transactions: MaintenanceTransactions,
        statements: MaintenanceStatements,
        horizons: Horizons,
        generations: Generations,
        *,
        generation_count: int,
    ) -> None:
        """Store the collaborators; a generation is due after the longest window divided by ``generation_count - 1``."""
        self._engine = engine
        self._transactions = transactions
        self._sql = statements
        self._horizons = horizons
        self._generations = generations
        self._generation_count = generation_count
        self._prevented: str | None = None

    def rows_to_drop(self, windows: Mapping[str, timedelta]) -> int:
        """Return about how many rows are in generations that were closed before the longest window began."""
        with short_transaction(self._engine) as connection:
            if self._horizons.without_window(connection, windows):
                return 0
            age = timedelta(seconds=float(connection.exec_driver_sql(self._sql.generation_seconds).scalar_one()))
        *closed, current = self._generations.list()
        until = current.opened_at + age - max(windows.values()) - PRODUCER_SLACK
        return sum(one.rows for one in closed if one.closed_at and one.closed_at < until)

    def rotate(self, windows: Mapping[str, timedelta], settled: Mapping[str, float]) -> int:
        """Open a generation if one is due, drop forgotten ones, and return about how many rows they had."""
        longest = max(windows.values(), default=timedelta.max)
        every_seconds = longest.total_seconds() / (self._generation_count - 1)

        def look(connection: Connection) -> tuple[float, list[str]]:
            age = float(connection.exec_driver_sql(self._sql.generation_seconds).scalar_one())
            return age, self._horizons.without_window(connection, windows)

        age, without = self._transactions.run(look)
        before = self._generations.list()
        most = 2 * self._generation_count
        prevented = None
        if without:
            prevented = (
                f"{len(without)} of the subscribers of the inbox may not be forgotten, {without[0]} first: no "
                "generation can go, so none is opened; give every subscriber a window that is long enough, '*' those "
                "that are not named"
            )
        elif age >= every_seconds and not self._generations.rotate(tries=ROTATION_TRIES, most=most):
            prevented = (
                f"no generation is opened: there are {len(before)}, and more would slow recording down"
                if len(before) >= most
                else "no generation is opened: transactions that use the inbox do not end; it is tried again"
            )
        self._note_prevented(prevented)
        dropped = self._generations.forget(settled=settled, tries=ROTATION_TRIES) if windows else ()
        rows = sum(one.rows for one in before if one.generation in dropped)
        noted = {"every_seconds": every_seconds if windows else None, "prevented_by": prevented}
        self._transactions.run(lambda connection: self._transactions.progress(connection, "rotation", rows, noted))
        return rows

    def _note_prevented(self, why: str | None) -> None:
        """Log what prevents rotation, once until it changes."""
        if why is not None and self._prevented != why:
            _log.error("rotation: %s", why)
        self._prevented = why


_log = logging.getLogger("txbox.maintenance")
