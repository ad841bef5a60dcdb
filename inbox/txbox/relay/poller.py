"""Watching the outbox: one thread that looks for messages, often while they come and seldom while they do not."""

import logging
import math
import threading
import time
from collections.abc import Callable

from sqlalchemy import Engine

from txbox.instrumentation import DatabaseLost, DatabaseRestored, Event
from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox.outbox.statements import OutboxStatements
from txbox.postgres.transactions import short_transaction
from txbox.relay.listener import Listener
from txbox.relay.reporter import Reporter
from txbox.relay.scheduler import OUTAGE_BACKOFF, Board
from txbox.relay.visible import Look

__all__ = ["Watcher"]

AWAKE_SECONDS = 1.0
"""So long after the last message, or ring, an idle relay still looks often."""

LOOK_SECONDS = 0.003
"""Between looks while messages come."""

IDLE_SECONDS = 0.6
"""Between looks while none do; a ring ends the wait."""


class Watcher:
    """Puts up on the board what it finds, and has the relay's reports written."""

    def __init__(
        self,
        engine: Engine,
        statements: OutboxStatements,
        board: Board,
        reporter: Reporter,
        *,
        listen: bool,
        stopping: threading.Event,
        counts: Callable[[], tuple[int, int]],
        on_look: Callable[[], None],
        emit: Callable[[Event], None],
    ) -> None:
        """Take what it works with.

        Args:
            engine: the database.
            statements: those of the outbox.
            board: where senders look.
            reporter: writes the reports.
            listen: let a ring end an idle wait.
            stopping: ends it.
            counts: returns how many messages were sent, and how many refusals there were.
            on_look: is called with every look.
            emit: is told of outages of the database.
        """
        self._engine = engine
        self._statements = statements
        self._board = board
        self._reporter = reporter
        self._listen = listen
        self._stopping = stopping
        self._counts = counts
        self._on_look = on_look
        self._emit = emit
        self._awake_until = self._drain_at = -math.inf

    def run(self) -> None:
        """Look until it is time to stop, whatever becomes of the database meanwhile."""
        failures = 0
        while not self._stopping.is_set():
            try:
                with (
                    self._engine.connect() as connection,
                    Listener(self._engine, self._statements, wanted=self._listen) as listener,
                ):
                    try:
                        look = Look(connection, self._statements)
                        while not self._stopping.is_set():
                            self._look_once(look)
                            self._on_look()
                            self._reporter.work(connection, *self._counts())
                            if failures:
                                failures = 0
                                self._emit(DatabaseRestored(RELAY_SUBSCRIBER, self._statements.outbox_message))
                            self._pause(look, listener)
                    except BaseException:
                        connection.invalidate()  # whatever it is may be this connection's state; the next is a new one
                        raise
            except BaseException as error:  # noqa: BLE001 - whatever it is, a relay that looks no more sends no more
                self._board.forget()
                failures += 1
                pause = OUTAGE_BACKOFF.seconds(failures)
                self._emit(DatabaseLost(RELAY_SUBSCRIBER, self._statements.outbox_message, error, pause))
                self._stopping.wait(pause)
        try:
            with short_transaction(self._engine) as connection:
                self._reporter.sign_off(connection)
        except Exception as error:  # noqa: BLE001 - the report of the status is all that would have gained by it
            _log.debug("the relay could not sign off: %s", error)

    def _look_once(self, look: Look) -> None:
        now, memory = time.monotonic(), self._board.memory
        found = look.again(anew=self._board.blind)
        # A held key is due again and again while its destination is away: that is no reason to be awake.
        if found.fresh or found.woken:
            self._awake_until = now + AWAKE_SECONDS
        if found or found.anew:
            self._board.put(found.fresh, found.due, server=found.server, anew=found.anew, memory=memory)

    def _pause(self, look: Look, listener: Listener) -> None:
        now = time.monotonic()
        if now < self._awake_until:
            self._stopping.wait(LOOK_SECONDS)
            if now >= self._drain_at:
                listener.drain()
                self._drain_at = now + AWAKE_SECONDS
        elif listener.wait(min(IDLE_SECONDS, max(look.due_in, LOOK_SECONDS)), self._stopping):
            self._awake_until = time.monotonic() + AWAKE_SECONDS


_log = logging.getLogger("txbox")
