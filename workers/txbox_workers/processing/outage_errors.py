"""Outages: database errors that no message has caused."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from txbox import Expired, InFlight, InvalidMessageId, MalformedMessage, Mismatch, SchemaMissing, TxboxError
from txbox.dead_letters.failures import describe
from txbox.dead_letters.order import KeyHeld
from txbox.postgres.drivers.greenlets import is_cancelled
from txbox.postgres.round_trip import PreparedLost
from txbox.postgres.sqlstates import (
    PREPARED_REMEDY,
    UNDEFINED_COLUMN,
    UNDEFINED_TABLE,
    is_lost_prepared_statement,
    is_outage,
    is_retryable,
    sqlstate,
)


def is_interruption(error: BaseException) -> bool:
    """Whether an error ends the work itself and is not its message's failure: Ctrl-C, or a cancelled task."""
    return isinstance(error, KeyboardInterrupt) or is_cancellation(error)


def is_cancellation(error: BaseException) -> bool:
    """Whether an error comes from the cancellation of the task in which this runs.

    A handler that raises CancelledError by itself has failed. A cancelled handler may raise another error, when its
    cleanup finds an unusable connection.
    """
    return is_cancelled() and any(isinstance(one, asyncio.CancelledError) for one in _with_contexts(error))


def is_own_cancellation(error: BaseException) -> bool:
    """Whether a handler's error comes from its cancelling its own wait, as ``asyncio.timeout`` does.

    SQLAlchemy invalidates the connection of a cancelled statement. A later error of SQLAlchemy or the driver does not
    count: the handler may have gone on using the session, or the connection may have been lost after a cancelled wait.
    """
    for one in _with_contexts(error):
        if isinstance(one, SQLAlchemyError | psycopg.Error):
            return False
        if isinstance(one, asyncio.CancelledError):
            return True
    return False


def _with_contexts(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


class DatabaseUnavailable(Exception):
    """The database cannot be used now, or did not answer a commit. No message is at fault.

    ``before_handler`` says that the error came before any handler ran, so no handler can have caused it.
    """

    def __init__(self, message: str, *, before_handler: bool = False) -> None:
        self.before_handler = before_handler
        super().__init__(message)


@contextmanager
def connecting() -> Iterator[None]:
    """Turn outage errors into DatabaseUnavailable, while no handler runs."""
    try:
        yield
    except Exception as error:
        if is_outage(error):
            raise unavailable(error, before_handler=True) from without_values(error)
        raise


@contextmanager
def bookkeeping(*, before_handler: bool = True) -> Iterator[None]:
    """Turn any error of our own short transactions into DatabaseUnavailable: no message is at fault."""
    try:
        yield
    except PreparedLost:
        raise
    except Exception as error:  # noqa: BLE001 - it is raised again, as another error
        raise _ours(error, before_handler=before_handler) from without_values(error)


@contextmanager
def recording_errors() -> Iterator[None]:
    """Turn an error of our own statement (no permission, disk full, read-only server) into DatabaseUnavailable.

    No message is at fault. If it counted as an attempt, a full disk would turn a whole queue into dead letters.
    """
    try:
        yield
    except (InFlight, Mismatch, Expired, KeyHeld, InvalidMessageId, MalformedMessage):
        raise
    except Exception as error:
        if is_retryable(error):
            raise
        raise _ours(error, before_handler=True) from without_values(error)


def _ours(error: BaseException, *, before_handler: bool) -> DatabaseUnavailable:
    """Like ``unavailable``, for a statement of txbox: a missing table or column is then one of its own."""
    found = unavailable(error, before_handler=before_handler)
    if sqlstate(error) in (UNDEFINED_TABLE, UNDEFINED_COLUMN) and SchemaMissing.remedy not in str(found):
        return DatabaseUnavailable(
            f"{found}; bring the tables up to date with {SchemaMissing.remedy}", before_handler=before_handler
        )
    return found


def unavailable(error: BaseException, *, before_handler: bool = False) -> DatabaseUnavailable:
    """Return in one line what has failed, without the statement's values, which are the content of messages."""
    found = without_values(error)
    primary = found.diag.message_primary if isinstance(found, psycopg.Error) else None
    is_said = isinstance(found, TxboxError)  # its cause only has the server's own words
    text = f"{type(found).__name__}: {primary or found}" if primary or is_said else " ".join(describe(found).split())
    remedy = f"; {PREPARED_REMEDY}" if is_lost_prepared_statement(error) else ""
    return DatabaseUnavailable(f"{text}{remedy}", before_handler=before_handler)


def without_values(error: BaseException) -> BaseException:
    """Return the driver's error where SQLAlchemy's error around it would print the statement's values."""
    return error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
