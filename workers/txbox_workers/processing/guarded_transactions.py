"""The transaction that handlers work in: the worker alone begins it, hands it out and ends it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine

from txbox import StatementLeftOpen, TransactionEnded, TransactionTimedOut
from txbox.postgres.engines import discard_if_session_broken, require_server, stop_preparing
from txbox.postgres.guards.commit_guard import begin, commit, is_refused_commit, remove_guard
from txbox.postgres.guards.connection_users import ConnectionUsers, abandon
from txbox.postgres.guards.transaction_guard import guard, left_in_use, protect
from txbox.postgres.round_trip import Reply, Statement, Step, StepFailed, rows_of, run_steps
from txbox.postgres.sqlstates import TIMED_OUT, is_lost_prepared_statement, sqlstate
from txbox_workers.processing.outage_errors import (
    DatabaseUnavailable,
    bookkeeping,
    is_cancellation,
    is_own_cancellation,
    unavailable,
    without_values,
)
from txbox_workers.processing.transaction_limits import TimeLimit, limit_steps, unlimited


class OpenTransaction:
    """An open transaction.

    Attributes:
        connection: the one it is on.
        answer: the answer to the statement that was sent with BEGIN.
        last: steps to send with COMMIT.
        asked: a step to send before those, if any.
        rows: the rows of ``asked``, once the transaction has committed.
        closed_by_handler: the handler has closed the connection; it was not lost.
    """

    def __init__(self, connection: Connection, answer: Reply | None) -> None:
        self.connection = connection
        self.answer = answer or Reply()
        self.last: Sequence[Step] = ()
        self.asked: Step | None = None
        self.rows: Sequence[tuple[Any, ...]] = ()
        self.closed_by_handler = False


class GuardedTransactions:
    """Opens transactions that only the worker can end."""

    def __init__(self, engine: Engine, limit: TimeLimit = unlimited) -> None:
        """Take the host's engine; its other connections are unaffected. ``limit`` returns each transaction's limit."""
        self._host = engine
        self._engine = guard(engine)
        self._limit = limit

    @contextmanager
    def open(
        self,
        turn: int | None = None,
        *,
        then: Step | None = None,
        after: Sequence[Step] = (),
        guarded: bool = True,
        lends_connection: bool = True,
    ) -> Iterator[OpenTransaction]:
        """Open one transaction. If the connection breaks, even at COMMIT, raise DatabaseUnavailable.

        If the answer to COMMIT is lost, it is not known whether the commit happened. Nothing is assumed: the delivery
        goes back to the broker, and when it comes again the inbox decides.

        Args:
            turn: a number; transactions with the same number normally run one after the other.
            then: a statement to send with BEGIN; its answer is the transaction's.
            after: statements to send behind that one.
            guarded: code that is not ours runs in it, and must not end it.
            lends_connection: that code may work with SQLAlchemy's connection, by a session.

        Raises:
            TransactionEnded: a handler has ended it or tried to; nothing is committed.
            TransactionTimedOut: the server has ended it; nothing is committed.
        """
        with bookkeeping():
            connecting = self._engine.connect()
        with connecting as connection:
            transaction = connection.begin()
            users = ConnectionUsers()
            try:
                with bookkeeping():
                    require_server(connection)
                    opened = OpenTransaction(connection, self._begin(connection, turn, then, after, guarded=guarded))
                with protect(connection, users) if guarded and lends_connection else nullcontext():
                    yield opened
                if users.end():
                    raise StatementLeftOpen
                if not transaction.is_active or connection.get_transaction() is not transaction:
                    raise TransactionEnded
                last = opened.last if opened.asked is None else [opened.asked, *opened.last]
                if not len(self._host.dispatch.commit):
                    results = commit(connection, *last, guarded=guarded)
                else:  # the host's listeners may add something before the commit
                    results = run_steps(connection, last)
                    if guarded:
                        remove_guard(connection)
                if opened.asked is not None:
                    opened.rows = rows_of(connection, results[0])
                transaction.commit()  # only for SQLAlchemy; the driver has nothing left to commit
            except BaseException as raised:
                error = raised.error if isinstance(raised, StepFailed) else raised
                lost_statement = is_lost_prepared_statement(error)
                cut = connection.invalidated and is_own_cancellation(error)
                if users.end() or users.have_streams() or left_in_use(connection):
                    abandon(connection)  # a thread or task of the handler may be using it; the server rolls back
                    raise
                broken = _is_broken(connection) or not _rolled_back(connection) or lost_statement
                ended = isinstance(error, TransactionEnded) or is_refused_commit(error)
                if lost_statement:
                    stop_preparing(connection)
                elif (broken or ended) and not connection.closed:
                    connection.invalidate()  # it may be in any state, such as autocommit
                if isinstance(error, DatabaseUnavailable):
                    # One of the worker's own statements has failed: an error of a handler's statement is the handler's
                    # failure. The pool's other connections are probably broken, too: each is closed at its next
                    # checkout. Disposing of the pool would leave those open that are checked out now.
                    if discard_if_session_broken(connection, error):
                        self._engine.pool._invalidate(None, error)  # type: ignore[arg-type] # noqa: SLF001 - no other way
                    raise
                if cut or is_cancellation(error):
                    raise  # that closed the connection, not the handler
                if sqlstate(error) in TIMED_OUT:
                    raise TransactionTimedOut from without_values(error)
                if broken:
                    raise unavailable(error, before_handler=lost_statement) from without_values(error)
                if ended and not isinstance(error, TransactionEnded):
                    raise TransactionEnded from without_values(error)
                raise

    def _begin(
        self, connection: Connection, turn: int | None, then: Step | None, after: Sequence[Step], *, guarded: bool
    ) -> Reply | None:
        """Begin on the server, in one round trip; wait for the turn in another, and if it does not come, go without."""
        limit = limit_steps(self._limit)
        answer = begin(connection, *limit, then=then, after=after, guarded=guarded)
        if turn is None or (answer is not None and answer.error is not None):
            return answer
        # After the record, which others may make at the same time: a turn is only for the handlers' locks.
        take = _TAKE_TURN.with_values(lock_timeout=f"{TURN_SECONDS * 1000:.0f}ms", turn=str(turn))
        try:
            run_steps(connection, [take])
        except StepFailed as failure:
            if not isinstance(failure.error, psycopg.errors.LockNotAvailable):
                raise failure.error from None
            connection.connection.rollback()
            return begin(connection, *limit, then=then, after=after, guarded=guarded)
        return answer


TURN_SECONDS = 5.0
"""How long to wait for a turn."""

_TAKE_TURN = Statement.of("""
WITH bound AS MATERIALIZED (
  SELECT current_setting('lock_timeout') AS before, set_config('lock_timeout', %(lock_timeout)s, true)
), turn AS MATERIALIZED (SELECT pg_advisory_xact_lock(%(turn)s::bigint) FROM bound)
SELECT set_config('lock_timeout', bound.before, true) FROM bound, turn""")
"""Wait until no other transaction has this number."""


def _rolled_back(connection: Connection) -> bool:
    """Roll back, and return whether the server has confirmed it."""
    try:
        connection.rollback()
        # SQLAlchemy sends no ROLLBACK for a transaction that a handler has ended. If the pool does not roll back either
        # (pool_reset_on_return), records whose handlers did not run would wait in the connection for the next commit.
        # This costs nothing where there is nothing left to roll back.
        dbapi_connection = connection.connection.dbapi_connection
        if dbapi_connection is not None:
            dbapi_connection.rollback()
    except Exception:  # noqa: BLE001 - the error that led here is reported instead
        connection.invalidate()
        return False
    return True


def _is_broken(connection: Connection) -> bool:
    """Whether the connection to the server is gone, so that the result of the last statement is unknown."""
    if connection.closed or connection.invalidated:
        return True
    dbapi_connection = connection.connection.dbapi_connection
    return dbapi_connection is None or bool(getattr(dbapi_connection, "closed", False))
