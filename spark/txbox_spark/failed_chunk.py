"""A chunk that is not merged, and why: as plain values, so that it comes back from an executor."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from txbox.sqlstates import LOCK_NOT_AVAILABLE, is_outage, is_retryable, sqlstate
from txbox_spark.columns import EventColumn

__all__ = ["FailedChunk"]


@dataclass(frozen=True, slots=True)
class FailedChunk:
    """A chunk that is not merged.

    Attributes:
        chunk: its number.
        error: why, in one line.
        passing: trying again may well help: a lost connection, a deadlock.
    """

    chunk: int
    error: str
    passing: bool

    @classmethod
    def of(cls, chunk: int, error: Exception, columns: Sequence[EventColumn]) -> "FailedChunk":
        """Describe an error with the source's own names for columns."""
        said = " ".join(str(getattr(error, "orig", None) or error).split())
        # In one pass, for a column of the source may be named as another one is on the way.
        names = {column.staged_as: column.name for column in columns}
        said = re.sub(r"\bcolumn (\w+):", lambda found: f"column {names.get(found[1], found[1])}:", said)
        # psycopg's own errors come from COPY, which SQLAlchemy does not see; without a code, the connection is gone.
        lost = isinstance(error, psycopg.OperationalError) and error.sqlstate is None
        passing = lost or is_outage(error) or is_retryable(error) or sqlstate(error) == LOCK_NOT_AVAILABLE
        return cls(chunk, said, passing)
