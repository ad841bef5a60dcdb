"""The transaction guard: a handler works in a transaction that only txbox may end.

A handler that commits it would commit the records of messages whose effects have not happened yet, and those messages
would be lost. Some ways can be refused before they happen (``commit`` and ``COMMIT`` through SQLAlchemy); others show
afterwards, but before the commit (a swallowed error). The server refuses what bypasses SQLAlchemy on the driver's own
connection: see ``txbox.postgres.guards.commit_guard``.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, event

from txbox.errors import StatementLeftOpen, TransactionAborted, TransactionEnded
from txbox.postgres.guards.connection_users import ConnectionUsers, watch


def guard(engine: Engine) -> Engine:
    """Return a copy of an engine, with the same pool, whose connections can be protected.

    It is a copy so that the host's other connections do not call our event listeners.
    """
    guarded = engine.execution_options()
    event.listen(guarded, "commit", _refuse_foreign_commit)
    event.listen(guarded, "before_cursor_execute", _refuse_commit_as_sql)
    watch(guarded)
    return guarded


@contextmanager
def protect(connection: Connection, users: ConnectionUsers) -> Iterator[None]:
    """Raise ``TransactionEnded`` if the block ends the transaction of a connection whose engine is guarded.

    ``users`` tracks the block: when it ends, what is still under way is known, and nothing more can begin.
    """
    users.attach(connection)
    vars(connection)[_PROTECTED] = True
    try:
        yield
    finally:
        users.end()
        vars(connection)[_PROTECTED] = False


def refuse_aborted(connection: Connection) -> None:
    """Refuse to commit a transaction in which a statement failed, or which SQL has ended.

    Postgres answers COMMIT in an aborted transaction with ROLLBACK, and drivers take that for success: if a handler
    swallowed the error of a statement, its message would be acked with nothing done. The driver knows the state from
    the last answer, so this costs no round trip.

    Raises:
        StatementLeftOpen, TransactionAborted, TransactionEnded: it cannot be committed.
    """
    if left_in_use(connection):
        raise StatementLeftOpen
    match _transaction_status(connection):
        case TransactionStatus.INERROR:
            raise TransactionAborted
        case TransactionStatus.IDLE:
            raise TransactionEnded


def is_intact(driver: Any) -> bool:
    """Whether psycopg's connection is in a transaction in which no statement has failed, and not in use.

    False may also mean that it is another driver's. This asks no more than each message's handler needs.
    """
    if not isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        return False
    pgconn = driver.pgconn
    return (
        pgconn.transaction_status == TransactionStatus.INTRANS
        and not pgconn.pipeline_status
        and not driver.lock.locked()
    )


def is_ended(connection: Connection) -> bool:
    """Whether the server's last answer said that no transaction is open, so one was ended. This costs no round trip."""
    return _transaction_status(connection) == TransactionStatus.IDLE


def left_in_use(connection: Connection) -> bool:
    """Whether a handler has left a statement unfinished on a connection: a stream, a copy, a pipeline.

    psycopg locks a connection while its statement runs, and a traceback keeps a generator alive, so a ROLLBACK on such
    a connection would wait for ever. It can only be closed.
    """
    if connection.closed or connection.invalidated:
        return False
    driver: Any = connection.connection.driver_connection
    if getattr(driver, "closed", False):
        return False
    lock, pgconn = getattr(driver, "lock", None), getattr(driver, "pgconn", None)  # psycopg's
    locked = getattr(lock, "locked", None)
    return (locked is not None and bool(locked())) or bool(getattr(pgconn, "pipeline_status", 0))


def _refuse_foreign_commit(connection: Connection) -> None:
    """Stop a handler from committing the worker's transaction; see the module."""
    if _is_protected(connection):
        raise TransactionEnded


def _refuse_commit_as_sql(
    connection: Connection, _cursor: object, statement: str, _parameters: object, _context: object, _many: bool
) -> None:
    """Stop a handler from ending the worker's transaction by SQL."""
    if _is_protected(connection) and ends_transaction(statement):
        raise TransactionEnded


def _is_protected(connection: Connection) -> bool:
    """Whether this is the protected connection; a handler may open and commit others of the same engine."""
    return bool(vars(connection).get(_PROTECTED))


def ends_transaction(sql: str) -> bool:
    """Whether a statement in an SQL text ends the transaction it runs in, or removes its commit guard.

    A commit may hide behind a comment, an empty statement or another one (``SELECT 1; COMMIT``). Text in quotes or in a
    function's body is not a statement, and ``ROLLBACK TO`` only goes back to a savepoint.
    """
    # Every message brings the same few texts, and parsing one takes up to 100 us; long texts may hold values.
    return _search_cached(sql) if len(sql) <= _MAX_CACHED_CHARACTERS else _search(sql)


def _search(sql: str) -> bool:
    if _FIRST_MAY_END.match(sql) is None and _LATER_MAY_END.search(sql) is None:
        return False
    # The server's setting decides what a backslash means in a plain string; a commit in either reading suffices.
    readings = (False, True) if "\\" in sql else (False,)
    return any(
        _ENDS.match(statement) for backslashes in readings for statement in _statements(sql, backslashes=backslashes)
    )


_MAX_CACHED_CHARACTERS = 4_000
_search_cached = lru_cache(maxsize=256)(_search)

_PROTECTED = "txbox_protected"

_FIRST_MAY_END = re.compile(r"\s*(?:COMMIT|END|ABORT|ROLLBACK|PREPARE|CLOSE|--|/\*)", re.IGNORECASE)
_LATER_MAY_END = re.compile(f";{_FIRST_MAY_END.pattern}", re.IGNORECASE)
"""Found wherever a statement may end the transaction, even inside strings; so most texts need no parsing."""

_ENDS = re.compile(
    r"\s*(?:(?:COMMIT|END|ABORT|PREPARE\s+TRANSACTION|CLOSE\s+(?:ALL|txbox_guard)"
    r"|ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b))\b"
    r'|CLOSE\s*(?:"txbox_guard"|U&"))',
    re.IGNORECASE,
)


def _transaction_status(connection: Connection) -> int:
    driver: Any = connection.connection.driver_connection
    if (is_in_transaction := getattr(driver, "is_in_transaction", None)) is not None:  # asyncpg's; true if aborted, too
        return TransactionStatus.INTRANS if is_in_transaction() else TransactionStatus.IDLE
    # psycopg 3 makes an object for each access to ``info``, which itself asks ``pgconn``.
    info = getattr(driver, "pgconn", None) or getattr(driver, "info", None)
    return int(getattr(info, "transaction_status", TransactionStatus.INTRANS))


def _statements(sql: str, *, backslashes: bool) -> Iterator[str]:
    r"""Yield the statements of a text as Postgres splits it, with a space for each comment, and with empty strings.

    Text in a string, a quoted name or a comment is not a statement, and where one of these ends depends on how it
    began: ``E'\''`` is a string of one quote, ``'\'`` one of a backslash. So no part can be read alone::

        SELECT E'\''; COMMIT; SELECT '1'      three statements
        SELECT '\''; COMMIT; SELECT '1'       an error; three with standard_conforming_strings=off

    The setting applies to a whole text, which Postgres parses before it runs any of it. Postgres runs nothing of a text
    that it cannot parse.

    https://www.postgresql.org/docs/current/sql-syntax-lexical.html, and scan.l in the source of Postgres

    Args:
        sql: the text.
        backslashes: whether a backslash escapes a quote in every string (standard_conforming_strings=off), and not
            only in those that begin with E.
    """
    text = sql.partition("\0")[0]  # a driver sends no more
    parts: list[str] = []
    at = 0
    while (token := _TOKEN.search(text, at)) is not None:
        parts.append(text[at : token.start()])
        at = token.end()
        match token.lastgroup:
            case "end":
                yield "".join(parts)
                parts.clear()
            case "word":
                parts.append(token[0])
            case "line_comment":
                parts.append(" ")
            case "comment":
                at = _end_of_comment(text, at)
                parts.append(" ")
            case "dollars":
                at = _after(token[0], text, at)
                parts.append("''")
            case "escaped":
                at = _end_of_escaped(text, at)
                parts.append("''")
            case "plain":
                at = _end_of_escaped(text, at) if backslashes else _after("'", text, at)
                parts.append("''")
            case _:
                parts.append("''")
    yield "".join([*parts, text[at:]])


def _after(mark: str, text: str, at: int) -> int:
    found = text.find(mark, at)
    return len(text) if found < 0 else found + len(mark)


def _end_of_comment(text: str, at: int) -> int:
    depth = 1  # comments nest
    while depth and (edge := _COMMENT_EDGE.search(text, at)) is not None:
        depth += 1 if edge[0] == "/*" else -1
        at = edge.end()
    return len(text) if depth else at


def _end_of_escaped(text: str, at: int) -> int:
    """Return where a string with escapes ends, given the position ``at`` after its first quote."""
    while (edge := _ESCAPED_EDGE.search(text, at)) is not None:
        at = edge.end()
        if edge[0] == "'":
            if (again := _CONTINUED.match(text, at)) is None:
                return at
            at = again.end()
    return len(text)


_LETTER = r"A-Za-z_\x80-\U0010ffff"
_TOKEN = re.compile(
    rf"""
      (?P<escaped> [eE]' )
    | (?P<literal> (?:[bBxX]|[uU]&)'[^']*'? )  # a backslash is no escape here, whatever the setting
    | (?P<word> (?:[uU]&)?"[^"]*"?             # two quotes in a quoted name end it here, and begin another
        | [{_LETTER}][{_LETTER}0-9$]* )        # a$$ is a name, and begins no string
    | (?P<plain> ' )
    | (?P<dollars> \$(?:[{_LETTER}][{_LETTER}0-9]*)?\$ )
    | (?P<line_comment> --[^\n\r]* )
    | (?P<comment> /\* )
    | (?P<end> ; )
    """,
    re.VERBOSE,
)
_COMMENT_EDGE = re.compile(r"/\*|\*/")
_ESCAPED_EDGE = re.compile(r"'|\\.?", re.DOTALL)
_CONTINUED = re.compile(r"(?:(?:[ \t\f\v]|--[^\n\r]*(?=[\n\r]))*[\n\r](?:[ \t\n\r\f\v]|--[^\n\r]*[\n\r])*)?'")
r"""A string continues after two quotes, and on a later line: ``E'a'``, a line break, ``'\''`` is one with escapes."""
