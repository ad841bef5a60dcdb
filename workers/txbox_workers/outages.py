"""Outages: trouble that is the database's, and no message's fault."""

from collections.abc import Iterator
from contextlib import contextmanager

from txbox import InFlight, InvalidMessageId, MalformedMessage, Mismatch
from txbox.sqlstates import is_outage, is_retryable

__all__ = ["DatabaseUnavailable", "bookkeeping", "connecting", "recording"]


class DatabaseUnavailable(Exception):
    """The database cannot be worked with now, or did not answer a commit; it is no message's fault.

    Attributes:
        before_handler: the trouble came before any handler was run, so no handler can have made it.
    """

    def __init__(self, message: str, *, before_handler: bool = False) -> None:
        self.before_handler = before_handler
        super().__init__(message)


@contextmanager
def connecting() -> Iterator[None]:
    """While no handler runs: what says that the database cannot be reached becomes DatabaseUnavailable."""
    try:
        yield
    except Exception as error:
        if is_outage(error):
            raise DatabaseUnavailable(str(error), before_handler=True) from error
        raise


@contextmanager
def bookkeeping() -> Iterator[None]:
    """Around our own short transactions: whatever fails there is no message's fault."""
    try:
        yield
    except Exception as error:
        raise DatabaseUnavailable(str(error), before_handler=True) from error


@contextmanager
def recording() -> Iterator[None]:
    """An error of our own statement (no permission, disk full, read-only server) is no message's fault.

    Were it counted as an attempt, a full disk would turn a whole queue into dead letters.
    """
    try:
        yield
    except (InFlight, Mismatch, InvalidMessageId, MalformedMessage):
        raise
    except Exception as error:
        if is_retryable(error):
            raise
        raise DatabaseUnavailable(str(error), before_handler=True) from error
