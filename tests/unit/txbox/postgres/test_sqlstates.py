"""What a database error means, however it is wrapped."""

import psycopg
import pytest
from psycopg import errors as postgres
from sqlalchemy.exc import DBAPIError, IntegrityError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from txbox import MalformedMessage
from txbox.postgres.sqlstates import DEADLOCK_DETECTED, SERIALIZATION_FAILURE, is_outage, is_retryable, sqlstate


def wrapped(
    original: psycopg.Error, kind: type[DBAPIError] = OperationalError, *, connection_lost: bool = False
) -> DBAPIError:
    """The error as SQLAlchemy raises it around the driver's."""
    return kind("SELECT 1", {}, original, connection_invalidated=connection_lost)


def raised_from(cause: BaseException) -> Exception:
    """An error of somebody's own, raised ``from`` another."""
    try:
        raise MalformedMessage("outer") from cause
    except MalformedMessage as error:
        return error


def test_the_code_is_found_at_any_depth() -> None:
    original = postgres.UniqueViolation("twice")
    assert sqlstate(original) == "23505"
    assert sqlstate(wrapped(original, IntegrityError)) == "23505"
    assert sqlstate(raised_from(wrapped(original, IntegrityError))) == "23505"
    assert sqlstate(raised_from(raised_from(original))) == "23505"


def test_what_is_no_database_error_has_no_code() -> None:
    assert sqlstate(ValueError("no")) is None
    assert sqlstate(wrapped(psycopg.OperationalError("refused"))) is None


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError("1"), ValueError("2")
    first.__cause__, second.__cause__ = second, first
    assert sqlstate(first) is None


@pytest.mark.parametrize(
    ("original", "code"),
    [(postgres.SerializationFailure(), SERIALIZATION_FAILURE), (postgres.DeadlockDetected(), DEADLOCK_DETECTED)],
)
def test_what_the_database_gave_up_for_order_is_run_again(original: psycopg.Error, code: str) -> None:
    error = wrapped(original)
    assert sqlstate(error) == code
    assert is_retryable(error)
    assert is_retryable(raised_from(error))
    assert not is_outage(error)


@pytest.mark.parametrize(
    "original", [postgres.UniqueViolation(), postgres.LockNotAvailable(), postgres.QueryCanceled()]
)
def test_other_errors_are_not_run_again(original: psycopg.Error) -> None:
    assert not is_retryable(wrapped(original))


@pytest.mark.parametrize(
    "error",
    [
        wrapped(psycopg.OperationalError("connection refused")),
        wrapped(psycopg.OperationalError("server closed the connection"), connection_lost=True),
        wrapped(psycopg.InterfaceError("the connection is closed"), InternalError, connection_lost=True),
        wrapped(postgres.AdminShutdown()),
        wrapped(postgres.CrashShutdown()),
        wrapped(postgres.CannotConnectNow()),
        wrapped(postgres.TooManyConnections()),
        wrapped(postgres.ConnectionFailure()),
        PoolTimeoutError("QueuePool limit of size 5 overflow 10 reached"),
    ],
    ids=lambda error: f"{type(error).__name__} {sqlstate(error)}",
)
def test_a_database_that_cannot_be_worked_with_is_an_outage(error: Exception) -> None:
    assert is_outage(error)
    assert not is_retryable(error)


@pytest.mark.parametrize(
    "error",
    [
        wrapped(postgres.UniqueViolation(), IntegrityError),
        wrapped(postgres.LockNotAvailable()),
        wrapped(postgres.QueryCanceled()),
        ValueError("a handler's own"),
        ConnectionError("of another service, not of the database"),
    ],
    ids=lambda error: f"{type(error).__name__} {sqlstate(error)}",
)
def test_an_error_of_one_statement_is_no_outage(error: Exception) -> None:
    assert not is_outage(error)
