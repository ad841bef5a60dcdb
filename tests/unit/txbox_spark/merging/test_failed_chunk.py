"""What is said of a chunk that failed, and whether trying again may help."""

import pickle

import psycopg
import pytest
from sqlalchemy.exc import DBAPIError, OperationalError

from txbox_spark.merging.effect_runner import ApplyFailed
from txbox_spark.merging.merge_plan import FailedChunk


def test_it_is_said_in_one_line() -> None:
    error = psycopg.DataError("several\n  lines\tof it")
    assert FailedChunk.of(7, error) == FailedChunk(7, "several lines of it", transient=False)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (psycopg.OperationalError("server closed the connection unexpectedly"), True),
        (psycopg.errors.DeadlockDetected("deadlock"), True),
        (psycopg.errors.LockNotAvailable("lock"), True),
        (psycopg.errors.SerializationFailure("again"), True),
        (OperationalError("SELECT", {}, psycopg.errors.AdminShutdown("terminating")), True),
        (OperationalError("SELECT", {}, psycopg.OperationalError("connection refused")), True),
        (DBAPIError("SELECT", {}, psycopg.errors.DeadlockDetected("deadlock")), True),
        (caused(ApplyFailed("applying failed"), psycopg.errors.DeadlockDetected("deadlock")), True),
        (caused(ApplyFailed("applying failed"), psycopg.errors.UndefinedTable("no table")), False),
        (DBAPIError("SELECT", {}, psycopg.errors.UndefinedTable("no table")), False),
        (psycopg.errors.InvalidTextRepresentation("no uuid"), False),
        (psycopg.errors.DiskFull("no space"), False),
    ],
)
def test_whether_it_may_pass(error: Exception, transient: bool) -> None:
    assert FailedChunk.of(0, error).transient is transient


def test_the_drivers_words_without_the_statement() -> None:
    error = DBAPIError("INSERT INTO a_very_long_statement", {}, psycopg.errors.UndefinedTable("no table"))
    failed = FailedChunk.of(3, error)
    assert failed.error == "no table"
    assert pickle.loads(pickle.dumps(failed)) == failed
