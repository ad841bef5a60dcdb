"""What Postgres says of an effect's statements before any event is merged: their plans, or why they cannot work."""

from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox.effects.sql_script import ScriptStatement
from txbox.postgres.server import SERVER
from txbox_spark.merging.effect_runner import ApplyFailed
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
            position = error.orig.diag.statement_position
            before = 0 if position is None else one.text.count("\n", 0, max(0, int(position) - len(_EXPLAIN) - 1))
            where = f" (line {one.line + before} of the statements)"
            raise ApplyFailed(f"the events cannot be applied: {describe_postgres_error(error.orig, where)}") from error
        plans.append(StatementPlan(one.text, tuple(lines)))
    return tuple(plans)


_EXPLAIN = "EXPLAIN (COSTS OFF) "
