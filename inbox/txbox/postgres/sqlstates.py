"""SQLSTATEs: what the errors of Postgres mean to us.

Codes: https://www.postgresql.org/docs/current/errcodes-appendix.html
"""

import re

import psycopg
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

__all__ = [
    "CONFLICTS",
    "DATABASE_ERRORS",
    "DEADLOCK_DETECTED",
    "INSUFFICIENT_PRIVILEGE",
    "INVALID_CURSOR_NAME",
    "LOCK_NOT_AVAILABLE",
    "OUT_OF_MEMORY",
    "PREPARED_REMEDY",
    "QUERY_CANCELED",
    "READ_ONLY",
    "SERIALIZATION_FAILURE",
    "TIMED_OUT",
    "UNDEFINED_COLUMN",
    "UNDEFINED_TABLE",
    "UNIQUE_VIOLATION",
    "conflict_relation",
    "is_lost_prepared_statement",
    "is_of_the_session",
    "is_outage",
    "is_retryable",
    "sqlstate",
]

DATABASE_ERRORS = (DBAPIError, psycopg.Error)
"""What a statement raises: on SQLAlchemy's connection, or on psycopg's own."""

SERIALIZATION_FAILURE = "40001"
DEADLOCK_DETECTED = "40P01"
LOCK_NOT_AVAILABLE = "55P03"
CONFLICTS = {DEADLOCK_DETECTED: "deadlock", SERIALIZATION_FAILURE: "serialization failure"}
INSUFFICIENT_PRIVILEGE = "42501"
INVALID_CURSOR_NAME = "34000"
OUT_OF_MEMORY = "53200"  # also if the lock table is full
QUERY_CANCELED = "57014"  # by a time-out, or by a person
READ_ONLY = "25006"  # read_only_sql_transaction
SYNTAX_ERROR = "42601"
UNDEFINED_COLUMN = "42703"
UNDEFINED_TABLE = "42P01"
TIMED_OUT = frozenset({"25P03", "25P04"})  # idle_in_transaction_session_timeout, transaction_timeout
UNIQUE_VIOLATION = "23505"

PREPARED_REMEDY = (
    "a pooler in transaction mode is between here and the database, and prepared statements do not work through it: "
    "put ?prepare_threshold=None into the database URL, or give create_engine(…, "
    'connect_args={"prepare_threshold": None})'
)


def sqlstate(error: BaseException) -> str | None:
    """Return the five-character code of a database error, however deeply it is wrapped; None if it has none.

    It may be psycopg's error, SQLAlchemy's error around it (``orig``), or anything raised ``from`` one.
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
    """Whether the same transaction may succeed if it runs again from its start."""
    return sqlstate(error) in (SERIALIZATION_FAILURE, DEADLOCK_DETECTED)


def conflict_relation(error: BaseException) -> str:
    """Return the relation on which a transaction conflicted with another; an empty text if the server does not say."""
    context = getattr(getattr(getattr(error, "orig", error), "diag", None), "context", None) or ""
    found = _RELATION.search(context)
    return found["name"] if found else ""


def is_lost_prepared_statement(error: BaseException) -> bool:
    """Whether a statement that psycopg prepared was not found, or its name belonged to another one.

    That means that a pooler switched servers; see ``PREPARED_REMEDY``.
    """
    if sqlstate(error) not in _PREPARED:
        return False
    text = str(getattr(error, "orig", None) or error)
    return "_pg3_" in text  # psycopg's names; statements that a handler names are its own affair


def is_of_the_session(error: BaseException) -> bool:
    """Whether a statement of ours may have failed only because of its session's state.

    A committed SET ROLE, search_path, statement_timeout or default_transaction_read_only stays with the connection, and
    so does a server that is no longer primary. Another connection may succeed.
    """
    code = sqlstate(error) or ""
    return code.startswith("42") or code in _SESSION_STATES


def is_outage(error: BaseException) -> bool:
    """Whether an error means that the database cannot be used for now, whatever is asked of it.

    That is a lost or refused connection, a server that starts, stops or has too many connections, or an exhausted pool.
    """
    if isinstance(error, PoolTimeoutError):
        return True
    if not isinstance(error, DBAPIError):
        return False
    code = sqlstate(error)
    if error.connection_invalidated:
        return True
    if code is None:
        return isinstance(error, OperationalError)
    return code.startswith("08") or code in _OUTAGES or is_lost_prepared_statement(error)


_RELATION = re.compile(r'in relation "(?P<name>(?:[^"]|"")+)"')

_PREPARED = ("26000", "42P05")  # invalid_sql_statement_name, duplicate_prepared_statement

_SESSION_STATES = frozenset(
    {
        "3F000",  # invalid_schema_name
        QUERY_CANCELED,
        READ_ONLY,
    }
)

_OUTAGES = frozenset(
    {
        "57P01",  # admin_shutdown
        "57P02",  # crash_shutdown
        "57P03",  # cannot_connect_now
        "53300",  # too_many_connections
    }
)
