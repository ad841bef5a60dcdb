"""Retries short transactions that may run twice while the database cannot be reached."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from txbox.backoff import Backoff, retry
from txbox.postgres.sqlstates import LOCK_NOT_AVAILABLE, is_outage, is_retryable, sqlstate

OUTAGE_ATTEMPTS = 8
"""With the pauses in between, this lasts at least half a minute, in which a standby can take over."""

OUTAGE_BACKOFF = Backoff(first_seconds=0.25)
"""The first pause is short, because the first failure empties a pool of dead connections."""

P = ParamSpec("P")
R = TypeVar("R")


def is_transient(error: BaseException) -> bool:
    """Return whether another attempt may succeed, such as after an outage, a deadlock or a lock timeout."""
    return is_outage(error) or is_retryable(error) or sqlstate(error) == LOCK_NOT_AVAILABLE


def retry_outages(work: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs ``work`` again, after a pause, if the database cannot be reached.

    Running ``work`` twice must be harmless, because only the answer to its COMMIT may have been lost.
    """

    @wraps(work)
    def retried(*args: P.args, **kwargs: P.kwargs) -> R:
        return retry(lambda: work(*args, **kwargs), again=_again, backoff=OUTAGE_BACKOFF, runs=OUTAGE_ATTEMPTS)

    return retried


def _again(error: Exception, _run: int) -> bool:
    if not isinstance(error, SQLAlchemyError) or not is_outage(error):
        return False
    _log.warning("bulk load: the database cannot be reached (%s); trying again", " ".join(str(error).split())[:200])
    return True


_log = logging.getLogger("txbox.spark")
