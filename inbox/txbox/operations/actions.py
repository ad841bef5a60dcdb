"""Actions of people: one row each, in the transaction of the action if that is in the same database."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import check_table
from txbox.text import storable

__all__ = ["AUDIT", "OperatorAction", "note_action", "read_actions"]


AUDIT = "audit"
"""The action of an audit that was asked to keep its result."""


class OperatorActionStatements(SqlFile, file="actions.sql"):
    note_action: str
    last_actions: str


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """Something that a person has done.

    Attributes:
        action_id: its number.
        acted_at: when, by the database's clock.
        actor: who did it.
        action: what was done, such as ``pause``.
        target: to what it was done.
        detail: further plain values.
    """

    action_id: int
    acted_at: datetime | None
    actor: str
    action: str
    target: str
    detail: Mapping[str, Any]


def note_action(
    connection: Connection,
    action: str,
    target: str,
    *,
    by: str,
    detail: Mapping[str, Any] | None = None,
    schema: str | None = None,
    prefix: str = "",
) -> None:
    """Record an action, in the caller's transaction.

    Args:
        connection: with a transaction.
        action: what is done, such as ``pause``.
        target: to what it is done.
        by: who does it.
        detail: plain values, as JSON has them.
        schema: the Postgres schema that holds the tables; None leaves it to the search path.
        prefix: what the tables' names start with.

    Raises:
        SchemaMissing: the table does not exist.
        RightsMissing: the table may not be read.
    """
    sql = OperatorActionStatements.load(schema, prefix)
    check_table(connection, sql.tables.operator_action)
    values = {
        "actor": storable(by),
        "action": action,
        "target": storable(target),
        "detail": json.dumps(dict(detail or {})).replace("\\u0000", "\\ufffd"),
    }
    connection.exec_driver_sql(sql.note_action, values)


def read_actions(
    connection: Connection,
    *,
    kinds: Sequence[str] | None = None,
    without: Sequence[str] = (),
    limit: int = 100,
    schema: str | None = None,
    prefix: str = "",
) -> tuple[OperatorAction, ...]:
    """Return the last actions, the newest first: those of ``kinds``, if given, and none of those in ``without``.

    Raises ``SchemaMissing``.
    """
    sql = OperatorActionStatements.load(schema, prefix)
    check_table(connection, sql.tables.operator_action)
    values = {"kinds": None if kinds is None else list(kinds), "without": list(without), "limit": limit}
    rows = connection.exec_driver_sql(sql.last_actions, values).mappings()
    return tuple(OperatorAction(**with_moments(row, "acted_at")) for row in rows)
