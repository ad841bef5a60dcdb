"""Runs a load's effect in the chunk's transaction: the caller's statements or function over ``fresh_event``.

Before any event is merged, Postgres can explain the statements, or say why they cannot work.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox import InvalidConfiguration, SqlEffect, StatementLeftOpen, TransactionEnded, TxboxError
from txbox.effects.sql_script import ScriptStatement, read_script
from txbox.postgres.guards.commit_guard import add_guard, is_refused_commit, remove_guard
from txbox.postgres.guards.connection_users import ConnectionUsers, abandon
from txbox.postgres.guards.transaction_guard import left_in_use, protect, refuse_aborted
from txbox.postgres.server import SERVER
from txbox.postgres.sql import in_one_statement
from txbox.postgres.sqlstates import sqlstate
from txbox_spark.merging.fresh_event import create_fresh
from txbox_spark.options import Apply
from txbox_spark.reading.columns import EventColumn
from txbox_spark.runtime.explanations import describe_postgres_error
from txbox_spark.runtime.retries import is_transient

FEATURE_NOT_SUPPORTED = "0A000"
NOT_ITS_OWN = "the chunk is the transaction: leave BEGIN, COMMIT, ROLLBACK and SAVEPOINT out"


class ApplyFailed(TxboxError):
    """The caller's statements or callable failed; nothing of the chunk is committed. The cause may be transient.

    Attributes:
        why: the cause, in one line.
    """

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"applying the events failed: {why}")


def apply_effects(connection: Connection, apply: Apply) -> None:
    """Apply the events in ``fresh_event``.

    Raises:
        ApplyFailed: the effect failed.
        TransactionEnded, TransactionAborted: a callable ended the transaction, or swallowed a statement's error.
        sqlalchemy.exc.DBAPIError: a deadlock or a serialization failure, or the connection is gone.
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
        # Check deferred constraints now. At COMMIT it would be too late to leave an event out.
        connection.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")
    except TransactionEnded:
        # SQLAlchemy believes the transaction has ended, so it would not roll the connection back.
        abandon(connection)
        raise
    except TxboxError:
        raise
    except Exception as error:
        if users.end() or left_in_use(connection):
            abandon(connection)  # a ROLLBACK would wait for ever
        if is_refused_commit(error):
            connection.invalidate()
            raise TransactionEnded from error
        if is_transient(error) and isinstance(error, DBAPIError | psycopg.Error):
            raise
        orig = error.orig if isinstance(error, DBAPIError) else error
        why = _describe(orig, apply) if isinstance(orig, psycopg.Error) else f"{type(error).__name__}: {error}"
        raise ApplyFailed(why) from error


def _describe(error: psycopg.Error, apply: Apply) -> str:
    """Describe an error in the caller's statements, without the statement that we wrap around them."""
    diagnostic = error.diag
    if diagnostic.message_primary is None:
        return str(error)
    if diagnostic.sqlstate == FEATURE_NOT_SUPPORTED and "EXECUTE of transaction" in diagnostic.message_primary:
        return NOT_ITS_OWN
    where = ""
    if isinstance(apply, SqlEffect):
        line = apply.line_on_table(error)
        where = "" if line is None else f" (line {line} of the statements)"
    elif isinstance(apply, str) and diagnostic.internal_query == apply and diagnostic.internal_position is not None:
        line = apply[: int(diagnostic.internal_position) - 1].count("\n") + 1
        where = f" (line {line} of the statements)"
    return describe_postgres_error(error, where)


LOCK_SECONDS = 10
"""How long to wait for a table that another transaction has locked."""


@dataclass(frozen=True, slots=True)
class StatementPlan:
    """One statement of an effect, and how Postgres would run it.

    Attributes:
        statement: its text.
        plan: the lines of EXPLAIN; None if Postgres cannot explain such a statement, or if it comes after one that it
            may depend on and that cannot be explained.
    """

    statement: str
    plan: tuple[str, ...] | None


def explain_statements(
    connection: Connection, columns: Sequence[EventColumn], statements: Sequence[ScriptStatement]
) -> tuple[StatementPlan, ...]:
    """Explain statements over an empty ``fresh_event`` with these columns, without running or writing anything.

    The caller must roll the transaction back.

    Raises:
        ApplyFailed: Postgres refuses a statement.
        sqlalchemy.exc.DBAPIError: the connection is gone, or a table is locked.
    """
    connection.exec_driver_sql(SERVER.bound_wait, {"lock_timeout": f"{LOCK_SECONDS}s"})
    connection.exec_driver_sql(create_fresh(columns))
    for one in statements:
        if not one.may_return_rows:
            _parse(connection, one.text, one.line)
    # The planner runs functions that are declared stable. Keep them from writing anything, too.
    connection.exec_driver_sql("SET TRANSACTION READ ONLY")
    plans: list[StatementPlan] = []
    for one in statements:
        if not one.may_return_rows or (plans and plans[-1].plan is None):
            plans.append(StatementPlan(one.text, None))
            continue
        try:
            lines = connection.exec_driver_sql(f"{_EXPLAIN}{one.text}".replace("%", "%%")).scalars().all()
        except DBAPIError as error:
            if is_transient(error) or not isinstance(error.orig, psycopg.Error):
                raise
            raise _refused(one.text, one.line, error.orig, len(_EXPLAIN)) from error
        plans.append(StatementPlan(one.text, tuple(lines)))
    return tuple(plans)


def check_syntax(connection: Connection, apply: Apply) -> None:
    """Raise if an effect's statements cannot be its statements. They do not run, and what they name need not exist yet.

    The caller must roll the transaction back.

    Raises:
        ApplyFailed: Postgres cannot parse a statement, or it begins or ends a transaction.
        sqlalchemy.exc.DBAPIError: the connection is gone.
    """
    script = apply.script if isinstance(apply, SqlEffect) else apply
    if not isinstance(script, str):
        return
    _parse(connection, script)
    with suppress(InvalidConfiguration):  # it may have parameters, as of PREPARE
        for one in read_script(script):
            if one.controls_transaction:
                raise ApplyFailed(f"{NOT_ITS_OWN} (line {one.line} of the statements)")


def _parse(connection: Connection, script: str, line: int = 1) -> None:
    """Raise if statements are not valid SQL: Postgres parses them as a function's body.

    It looks no further at a body whose parameters may have any type. So what is named need not exist yet, nor have the
    columns that it will have.
    """
    tag = "txbox"
    while f"${tag}" in script:
        tag += "x"
    head = f"CREATE FUNCTION pg_temp.txbox_parsed(anyelement) RETURNS void LANGUAGE sql AS ${tag}$"
    savepoint = connection.begin_nested()
    try:
        connection.exec_driver_sql("SET LOCAL check_function_bodies = on")
        connection.exec_driver_sql(f"{head}{script}${tag}$".replace("%", "%%"))
    except DBAPIError as error:
        if is_transient(error) or not isinstance(error.orig, psycopg.Error):
            raise
        if sqlstate(error) == SYNTAX_ERROR:
            raise _refused(script, line, error.orig, len(head)) from error
    savepoint.rollback()


def _refused(script: str, line: int, error: psycopg.Error, before: int) -> ApplyFailed:
    """Return the error for statements that Postgres refuses; we put ``before`` characters before them."""
    position = error.diag.statement_position
    lines = 0 if position is None else script.count("\n", 0, max(0, int(position) - before - 1))
    where = f" (line {line + lines} of the statements)"
    return ApplyFailed(f"the events cannot be applied: {describe_postgres_error(error, where)}")


SYNTAX_ERROR = "42601"
_EXPLAIN = "EXPLAIN (COSTS OFF) "
