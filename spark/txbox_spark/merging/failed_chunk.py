"""A chunk that is not merged, and why: as plain values, so that it comes back from an executor."""

from dataclasses import dataclass

import psycopg

from txbox_spark.runtime.explanations import describe_postgres_error
from txbox_spark.runtime.retries import is_transient


@dataclass(frozen=True, slots=True)
class FailedChunk:
    """A chunk that is not merged."""

    chunk: int  # its number
    error: str  # why, in one line
    transient: bool  # another attempt may succeed: a lost connection, a deadlock

    @classmethod
    def of(cls, chunk: int, error: Exception) -> "FailedChunk":
        """Describe an error."""
        orig = getattr(error, "orig", None) or error
        line = describe_postgres_error(orig) if isinstance(orig, psycopg.Error) else " ".join(str(orig).split())
        # psycopg's own errors come from COPY, which SQLAlchemy does not see; without a code, the connection is gone.
        lost = isinstance(error, psycopg.OperationalError) and error.sqlstate is None
        transient = lost or is_transient(error)
        return cls(chunk, line, transient)
