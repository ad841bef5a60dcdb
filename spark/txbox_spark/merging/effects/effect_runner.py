"""The effect of a bulk load, in the chunk's transaction: the caller's statements or function over ``fresh_event``."""

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox import SqlEffect, StatementLeftOpen, TransactionEnded, TxboxError
from txbox.postgres.guards.commit_guard import add_guard, is_refused_commit, remove_guard
from txbox.postgres.guards.connection_users import ConnectionUsers, abandon
from txbox.postgres.guards.transaction_guard import left_in_use, protect, refuse_aborted
from txbox.postgres.sql import in_one_statement
from txbox_spark.options import Apply
from txbox_spark.runtime.explanations import describe_postgres_error
from txbox_spark.runtime.retries import is_transient

FEATURE_NOT_SUPPORTED = "0A000"


class ApplyFailed(TxboxError):
    """The caller's statements, or callable, failed; nothing of the chunk is committed. Its cause may be transient.

    Attributes:
        why: the cause, in one line.
    """

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"applying the events failed: {why}")


def apply_effects(connection: Connection, apply: Apply) -> None:
    """Apply the events in ``fresh_event``.

    Raises:
        ApplyFailed: it failed.
        TransactionEnded, TransactionAborted: a callable has ended the transaction, or swallowed a statement's error.
        sqlalchemy.exc.DBAPIError: a deadlock, a serialization failure, or the connection is gone.
    """
    users = ConnectionUsers()
    try:
        if isinstance(apply, str):
            connection.exec_driver_sql(in_one_statement(apply).replace("%", "%%"))
        elif isinstance(apply, SqlEffect):
            apply.apply_table(connection)
        else:
            add_guard(connection)
            with protect(connection, users):
                apply(connection)
            if users.end():
                raise StatementLeftOpen
            refuse_aborted(connection)
            remove_guard(connection)
        # COMMIT would check them, when it is too late to leave an event out.
        connection.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")
    except TransactionEnded:
        # To SQLAlchemy the transaction has ended; it would not roll the connection back.
        abandon(connection)
        raise
    except TxboxError:
        raise
    except Exception as error:
        if users.end() or left_in_use(connection):
            abandon(connection)  # it would wait for a ROLLBACK for ever
        if is_refused_commit(error):
            connection.invalidate()
            raise TransactionEnded from error
        if is_transient(error) and isinstance(error, DBAPIError | psycopg.Error):
            raise
        orig = error.orig if isinstance(error, DBAPIError) else error
        why = _describe(orig, apply) if isinstance(orig, psycopg.Error) else f"{type(error).__name__}: {error}"
        raise ApplyFailed(why) from error


def _describe(error: psycopg.Error, apply: Apply) -> str:
    """Describe an error in the caller's statements, without our statement around them."""
    diagnostic = error.diag
    if diagnostic.message_primary is None:
        return str(error)
    if diagnostic.sqlstate == FEATURE_NOT_SUPPORTED and "EXECUTE of transaction" in diagnostic.message_primary:
        return "the chunk is the transaction: leave BEGIN, COMMIT, ROLLBACK and SAVEPOINT out"
    where = ""
    if isinstance(apply, SqlEffect):
        line = apply.line_on_table(error)
        where = "" if line is None else f" (line {line} of the statements)"
    elif isinstance(apply, str) and diagnostic.internal_query == apply and diagnostic.internal_position is not None:
        line = apply[: int(diagnostic.internal_position) - 1].count("\n") + 1
        where = f" (line {line} of the statements)"
    return describe_postgres_error(error, where)
