"""Sessions and other things that hold an old snapshot, and so keep Postgres from cleaning up.

A deleted row stays in place until no transaction can need it any more. Relays read behind what they have read before,
so an old snapshot does not slow them down; but tables and indexes grow, and slow down everything else that reads them.
"""

import re
from dataclasses import dataclass

from sqlalchemy import Connection

from txbox.postgres.sql_files import SqlFile

__all__ = ["SnapshotHolder", "find_snapshot_holders", "sees_all_sessions", "without_values"]

HELD_SECONDS = 60.0
"""A transaction is listed if it has been open for longer, and holds back ``HELD_TRANSACTIONS``."""

HELD_TRANSACTIONS = 100
"""Holding back fewer transactions does no harm."""

HELD_MANY_TRANSACTIONS = 100_000
"""Whatever holds back so many is listed regardless of its age, which is not known of everything."""

MOST_HOLDERS = 5
QUERY_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class SnapshotHolder:
    """What keeps Postgres from cleaning up.

    Attributes:
        kind: ``session``, ``prepared transaction``, ``replication slot``, or ``standby`` (by its feedback).
        transactions: how many transactions have begun since; what they deleted is still there.
        pid: of the server process; None if there is none.
        owner: the user; None if there is none.
        name: a session's application name, or the name of a slot or a prepared transaction.
        state: of the session, such as ``idle in transaction``; None if this user may not see it.
        seconds: how long its transaction has been open; None if this user may not see it, or it has no time.
        query: its last statement, shortened, without values; None if this user may not see it.
    """

    kind: str
    transactions: int
    pid: int | None = None
    owner: str | None = None
    name: str | None = None
    state: str | None = None
    seconds: float | None = None
    query: str | None = None


class SnapshotHolderStatements(SqlFile, file="snapshot_holders.sql"):
    snapshot_holders: str
    sees_all_sessions: str


def sees_all_sessions(connection: Connection) -> bool:
    """Whether this user may see what others run."""
    return bool(connection.exec_driver_sql(SnapshotHolderStatements.load().sees_all_sessions).scalar_one())


def find_snapshot_holders(connection: Connection) -> tuple[SnapshotHolder, ...]:
    """Return what has held a snapshot for long, oldest first, at most ``MOST_HOLDERS``."""
    limits = {
        "seconds": HELD_SECONDS,
        "transactions": HELD_TRANSACTIONS,
        "many_transactions": HELD_MANY_TRANSACTIONS,
        "limit": MOST_HOLDERS,
    }
    found = []
    for row in connection.exec_driver_sql(SnapshotHolderStatements.load().snapshot_holders, limits).mappings():
        hidden = row["query"] is None or row["query"] == _HIDDEN
        query = None if hidden else without_values(row["query"])[:QUERY_CHARACTERS]
        found.append(SnapshotHolder(**{**row, "query": query or None}))
    return tuple(found)


def without_values(query: str) -> str:
    """Return a statement on one line, without its comments and with ``?`` for every value.

    If the server cut the statement off inside a value, the value is taken to reach to its end.
    """
    return " ".join(_PART.sub(_shown, query).split())


def _shown(found: re.Match[str]) -> str:
    if found["comment"]:
        return " "
    return found[0] if found["name"] else "?"


_HIDDEN = "<insufficient privilege>"

# https://www.postgresql.org/docs/current/sql-syntax-lexical.html; comments are taken not to nest.
_PART = re.compile(
    r"""
    (?P<comment> --[^\n]* | /\*.*?(?:\*/|\Z) )
    | (?P<name> "(?:[^"]|"")*(?:"|\Z) | \$\d+ | [^\W\d][\w$]*(?![\w$'&]) )
    | \b[eE]'(?:[^'\\]|\\.|'')*(?:'|\Z|\\\Z)
    | (?:\b(?:[bBxXnN]|[uU]&))?'(?:[^']|'')*(?:'|\Z)
    | \$(?P<tag>(?:[^\W\d]\w*)?)\$.*?(?:\$(?P=tag)\$|\Z)
    | \d[\w.]*
    """,
    re.VERBOSE | re.DOTALL,
)
