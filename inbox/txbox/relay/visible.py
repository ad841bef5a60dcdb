"""Looking for messages: what has become visible since the last look. The parsing is pure, the query one statement."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from txbox.outbox.statements import OutboxStatements
from txbox.postgres.transactions import driver_cursor

__all__ = ["Found", "Look", "Snapshot"]

MAX_FRESH = 10_000
"""Messages that one look takes in one by one. A burst of more is looked at lane by lane instead."""

DUE_SECONDS = 0.1
"""At least so long between looks for messages that waited for a time."""

EVERYTHING_SECONDS = 30.0
"""Between looks at everything, at least, for what no other look finds: rows that somebody has restored."""

EVERYTHING_SHARE = 0.02
"""How much of its time a relay spends on them, at most."""

MEND_SECONDS = 600.0
"""Between searches for keys that wait for a message which is not there any more."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which transactions had ended at one moment, as pg_current_snapshot() tells.

    https://www.postgresql.org/docs/current/functions-info.html#FUNCTIONS-INFO-SNAPSHOT

    Attributes:
        xmax: transactions from this number on had not begun.
        in_progress: of those below it, the ones that had not ended.
    """

    xmax: int
    in_progress: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "Snapshot":
        """Read ``xmin:xmax:first,second,…``."""
        _, xmax, in_progress = text.split(":")
        return cls(int(xmax), tuple(int(number) for number in in_progress.split(",") if number))


@dataclass(frozen=True, slots=True)
class Found:
    """What a look has found.

    Attributes:
        server: which run of which server has answered; another one may have forgotten what was seen before.
        anew: this was a look at everything, as the one before it was answered by another run of a server, or as it was
            asked for: what was found before does not count.
        fresh: lanes with new messages, and the first position of those in each.
        due: lanes with held keys whose time has come.
        woken: messages that waited for a time have been put behind the others; the next look finds them.
    """

    server: str = ""
    anew: bool = False
    fresh: dict[int, int] = field(default_factory=dict)
    due: frozenset[int] = frozenset()
    woken: bool = False

    def __bool__(self) -> bool:
        return bool(self.fresh or self.due or self.woken)


class Look:
    """Looks again and again, each time for what is new. The first time, at everything."""

    def __init__(self, connection: Connection, statements: OutboxStatements) -> None:
        """Take the connection; nothing that another one has seen counts here, for it may have been another server.

        Args:
            connection: lent by an engine, and used by nobody else.
            statements: those of the outbox.
        """
        # One round trip for a look; but at a higher level a look would be a transaction for others to conflict with.
        connection.execution_options(isolation_level="AUTOCOMMIT")
        default = connection.exec_driver_sql(statements.default_isolation).scalar_one()
        if default != "read committed":
            connection.commit()
            connection.execution_options(isolation_level="READ COMMITTED")
        self._connection = connection
        self._statements = statements
        self._last: Snapshot | None = None
        self._server: str | None = None
        self._due_at = math.inf
        self._everything_at = self._look_for_due_at = self._mend_at = -math.inf

    @property
    def due_in(self) -> float:
        """In how many seconds a message is due that waits for a time, as far as is known; infinity: none is."""
        return self._due_at - time.monotonic()

    def again(self, *, anew: bool = False) -> Found:
        """Look.

        Args:
            anew: at everything, as if for the first time.

        Raises:
            Exception: whatever the driver says.
        """
        now = time.monotonic()
        also_due = now >= min(self._look_for_due_at, self._due_at)
        with driver_cursor(self._connection) as cursor:
            answer = self._look(cursor, now, also_due=also_due, anew=anew)
            if answer[1] != self._server:
                if not anew and self._last is not None:
                    answer = self._look(cursor, now, also_due=also_due, anew=True)
                anew = True
            seen, server, lanes, positions, due_in, held_due = answer
            snapshot = Snapshot.parse(seen)
            # Behind a pooler, another server may answer from one moment to the next. Its numbers say nothing beside
            # those of the one before.
            if self._last is not None and snapshot.xmax < self._last.xmax:
                self._everything_at = -math.inf
            woken = False
            if also_due:
                self._look_for_due_at = now + DUE_SECONDS
                self._due_at = math.inf if due_in is None else now + due_in
                if self._due_at <= now:
                    cursor.execute(self._statements.wake_due, (MAX_FRESH,))
                    woken = cursor.rowcount > 0
            if now >= self._mend_at:
                self._mend_at = now + MEND_SECONDS
                cursor.execute(self._statements.mend, ())
            self._commit()
        self._last, self._server = snapshot, server
        fresh = dict(zip(lanes or (), positions or (), strict=True))
        return Found(server, anew, fresh, frozenset(held_due), woken)

    def _look(self, cursor: Any, now: float, *, also_due: bool, anew: bool) -> tuple[Any, ...]:
        sql, last = self._statements, self._last
        if anew or last is None or now >= self._everything_at:
            cursor.execute(sql.look_at_all, (also_due, also_due))
            everything = tuple(cursor.fetchone())
            took = time.monotonic() - now
            self._everything_at = now + max(EVERYTHING_SECONDS, took / EVERYTHING_SHARE)
            return everything
        in_progress = list(last.in_progress)
        cursor.execute(sql.look, (last.xmax, MAX_FRESH, in_progress, MAX_FRESH, also_due, also_due))
        *answer, seen = cursor.fetchone()
        if seen >= MAX_FRESH:
            # Some were not seen, perhaps the first ones of a key: what was seen is not to be gone by.
            self._commit()
            cursor.execute(sql.begin_look)
            cursor.execute(sql.plan_look)
            cursor.execute(sql.look_at_burst, (last.xmax, in_progress, also_due, also_due))
            answer = cursor.fetchone()
            cursor.execute(sql.end_look)
        return tuple(answer)

    def _commit(self) -> None:
        # What SQLAlchemy has not seen begin, it would not end.
        self._connection.connection.commit()
