"""What Postgres says of an effect's statements before any event is merged: their plans, or why they cannot work."""

from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox.effects.sql_script import ScriptStatement
from txbox.postgres.server import SERVER
from txbox.postgres.sqlstates import sqlstate
from txbox_spark.merging.effects.effect_runner import ApplyFailed
from txbox_spark.merging.fresh_event import create_fresh
from txbox_spark.reading.columns import EventColumn
from txbox_spark.runtime.explanations import describe_postgres_error
from txbox_spark.runtime.retries import is_transient

LOCK_SECONDS = 10
"""How long to wait for a table that another transaction has locked."""


@dataclass(frozen=True, slots=True)
class StatementPlan:
    """One statement of an effect, and how Postgres would run it.

    Attributes:
        statement: its text.
        plan: the lines of EXPLAIN; None: Postgres explains no such statement, or it needs what such a one makes.
    """

    statement: str
    plan: tuple[str, ...] | None


def explain_statements(
    connection: Connection, columns: Sequence[EventColumn], statements: Sequence[ScriptStatement]
) -> tuple[StatementPlan, ...]:
    """Explain statements over an empty ``fresh_event`` with these columns; nothing is run, and nothing written.

    The transaction has to be rolled back then.

    Raises:
        ApplyFailed: Postgres refuses a statement.
        sqlalchemy.exc.DBAPIError: the connection is gone, or a table is locked.
    """
    connection.exec_driver_sql(SERVER.bound_wait, {"lock_timeout": f"{LOCK_SECONDS}s"})
    connection.exec_driver_sql(create_fresh(columns))
    for one in statements:
        if not one.may_return_rows:
            _check_syntax(connection, one)
    # The planner runs functions that call themselves stable; they write nothing either.
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
            raise _refused(one, error.orig, len(_EXPLAIN)) from error
        plans.append(StatementPlan(one.text, tuple(lines)))
    return tuple(plans)


def _check_syntax(connection: Connection, one: ScriptStatement) -> None:
    """Refuse a statement that cannot be explained and is not even SQL: Postgres parses the body of a function.

    What else it says of the body is left: the statement may need what others make.
    """
    tag = "txbox"
    while f"${tag}" in one.text:
        tag += "x"
    head = f"CREATE FUNCTION pg_temp.txbox_parsed() RETURNS void LANGUAGE sql AS ${tag}$"
    savepoint = connection.begin_nested()
    try:
        connection.exec_driver_sql("SET LOCAL check_function_bodies = on")
        connection.exec_driver_sql(f"{head}{one.text}${tag}$".replace("%", "%%"))
    except DBAPIError as error:
        if is_transient(error) or not isinstance(error.orig, psycopg.Error):
            raise
        if sqlstate(error) == SYNTAX_ERROR:
            raise _refused(one, error.orig, len(head)) from error
    savepoint.rollback()


def _refused(one: ScriptStatement, error: psycopg.Error, before: int) -> ApplyFailed:
    """Return the error for a statement that Postgres refuses, which had so many characters of ours before it."""
    position = error.diag.statement_position
    lines = 0 if position is None else one.text.count("\n", 0, max(0, int(position) - before - 1))
    where = f" (line {one.line + lines} of the statements)"
    return ApplyFailed(f"the events cannot be applied: {describe_postgres_error(error, where)}")


SYNTAX_ERROR = "42601"
_EXPLAIN = "EXPLAIN (COSTS OFF) "
