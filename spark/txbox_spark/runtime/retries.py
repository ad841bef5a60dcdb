"""Patience with a database that is away for a while: for short transactions of ours that may be done twice."""

import logging
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from txbox.backoff import Backoff
from txbox.postgres.sqlstates import LOCK_NOT_AVAILABLE, is_outage, is_retryable, sqlstate

__all__ = ["OUTAGE_ATTEMPTS", "is_transient", "retry_outages"]

OUTAGE_ATTEMPTS = 8
"""How often it is tried; with the pauses between, for half a minute or more, in which a standby can take over."""

OUTAGE_BACKOFF = Backoff(first_seconds=0.25)
"""The first pause is short, for a pool that lost its server is full of dead connections, and knows it then."""

P = ParamSpec("P")
R = TypeVar("R")


def is_transient(error: BaseException) -> bool:
    """Whether what has failed may well succeed later: an outage, a deadlock, a lock that was not to be had."""
    return is_outage(error) or is_retryable(error) or sqlstate(error) == LOCK_NOT_AVAILABLE


def retry_outages(work: Callable[P, R]) -> Callable[P, R]:
    """Try again, with pauses, what has failed because the database could not be reached.

    The answer to a COMMIT may be what was lost; so it must be harmless to do the work twice.
    """

    @wraps(work)
    def patiently(*args: P.args, **kwargs: P.kwargs) -> R:
        for failures in range(1, OUTAGE_ATTEMPTS):
            try:
                return work(*args, **kwargs)
            except SQLAlchemyError as error:
                if not is_outage(error):
                    raise
                _log.warning("bulk load: the database is away (%s); trying again", " ".join(str(error).split())[:200])
                time.sleep(OUTAGE_BACKOFF.seconds(failures))
        return work(*args, **kwargs)

    return patiently


_log = logging.getLogger("txbox.spark")
