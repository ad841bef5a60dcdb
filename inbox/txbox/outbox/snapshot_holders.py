"""The sessions and other things that hold an old snapshot, and so keep Postgres from cleaning up.

A row that was deleted stays where it is until no transaction can need it any more. Relays read behind what they have
read before, so an old snapshot does not slow them down; but tables and indexes grow, and slow all else that reads them.
"""

import re
from dataclasses import dataclass

from sqlalchemy import Connection

from txbox.postgres.sql_files import SqlFile

__all__ = ["SnapshotHolder", "find_snapshot_holders", "sees_all_sessions", "without_values"]

HELD_SECONDS = 60.0
"""A transaction is listed when it has been open for longer, and holds back ``HELD_TRANSACTIONS``."""

HELD_TRANSACTIONS = 100
"""So many others at least; fewer do no harm."""

HELD_MANY_TRANSACTIONS = 100_000
"""What holds back so many is listed however long it has been open, which cannot be read of everything."""

MOST_HOLDERS = 5
QUERY_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class SnapshotHolder:
    """What keeps Postgres from cleaning up.

    Attributes:
        kind: ``session``, ``prepared transaction``, ``replication slot``, or ``standby`` (by its feedback).
        transactions: how many transactions have begun since; what they deleted is still there.
        pid: of the server process; None where there is none.
        owner: the user; None where there is none.
        name: application name of a session, or what a slot or a prepared transaction is called.
        state: of the session, such as ``idle in transaction``; None if it may not be seen.
        seconds: how long its transaction has been open; None if it may not be seen, or has no time.
        query: what it ran last, shortened, without its values; None if it may not be seen.
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
    """The statements of ``snapshot_holders.sql``, which need no table of ours."""

    snapshot_holders: str
    sees_all_sessions: str


def sees_all_sessions(connection: Connection) -> bool:
    """Whether this user may see what others run."""
    return bool(connection.exec_driver_sql(SnapshotHolderStatements.load().sees_all_sessions).scalar_one())


def find_snapshot_holders(connection: Connection) -> tuple[SnapshotHolder, ...]:
    """Return what has held a snapshot for long, the oldest first; at most ``MOST_HOLDERS``."""
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
    """Return a statement on one line, without its comments and with ``?`` in place of every value in it.

    A statement that the server has cut off may end within a value, which then goes to the end.
    """
    return " ".join(_PART.sub(_shown, query).split())


def _shown(found: re.Match[str]) -> str:
    if found["comment"]:
        return " "
    return found[0] if found["name"] else "?"


_HIDDEN = "<insufficient privilege>"

# https://www.postgresql.org/docs/current/sql-syntax-lexical.html; a comment is taken to its first end.
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
