"""What the errors of Postgres mean to us.

Codes: https://www.postgresql.org/docs/current/errcodes-appendix.html
"""

__all__ = [
    "DEADLOCK_DETECTED",
    "LOCK_NOT_AVAILABLE",
    "SERIALIZATION_FAILURE",
    "UNDEFINED_TABLE",
    "is_retryable",
    "sqlstate",
]

SERIALIZATION_FAILURE = "40001"
DEADLOCK_DETECTED = "40P01"
LOCK_NOT_AVAILABLE = "55P03"
UNDEFINED_TABLE = "42P01"


def sqlstate(error: BaseException) -> str | None:
    """Return the five-character code of a database error, however deep it is wrapped; None if it has none.

    Args:
        error: an error of psycopg, of SQLAlchemy around it (``orig``), or of anything raised ``from`` one.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        code = getattr(current, "sqlstate", None)
        if isinstance(code, str):
            return code
        current = getattr(current, "orig", None) or current.__cause__
    return None


def is_retryable(error: BaseException) -> bool:
    """Whether the same transaction, run again from its start, may well succeed."""
    return sqlstate(error) in (SERIALIZATION_FAILURE, DEADLOCK_DETECTED)
