"""Several of our statements in one round trip: libpq's pipeline mode, beneath SQLAlchemy and psycopg's cursors.

A cursor costs 50 to 130 us of the client's time for each statement, and a round trip. Here statements are sent one
after the other and their answers are read together, for 10 to 20 us each::

    client   BEGIN ─ limit ─ record ─ sync ──┐                     the transaction stays open
    server                                   └── ok ─ ok ─ row ─ sync

If one fails, the server skips those after it, and aborts the transaction if there is one. So a COMMIT sent behind other
statements commits only if none of them failed.

A statement that has a plan is prepared when it first runs on a connection. Its name is a digest of its text, so no
client, behind whatever pooler, has another statement under the same name. Where nothing may be prepared
(``prepare_threshold=None``, or a pooler was noticed, see ``engines``), the text is sent each time. After a ROLLBACK or
a DROP, psycopg discards everything prepared on the connection (DEALLOCATE ALL), and the host may do so too:
``PreparedLost``.

https://www.postgresql.org/docs/current/libpq-pipeline-mode.html
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus
from sqlalchemy import Connection

from txbox.postgres.drivers.greenlets import wait_for
from txbox.postgres.drivers.own_adapters import driver_of, reader_of

Value = bytes | None
"""A parameter in Postgres's text format; None: null."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement with parameters $1, $2, ….

    text: in UTF-8.
    parameters: their names, in order.
    has_plan: whether preparing it pays; for BEGIN, say, it does not.
    """

    text: bytes
    parameters: tuple[str, ...] = ()
    has_plan: bool = True
    name: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self.text).hexdigest()[:32]
        object.__setattr__(self, "name", f"txbox_{digest}".encode())

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, text: str, *, has_plan: bool = True) -> "Statement":
        """Return a statement made from one of a ``SqlFile``, whose parameters are ``%(name)s``."""
        names: list[str] = []

        def number(match: re.Match[str]) -> str:
            if match[0] == "%%":
                return "%"
            if match[1] not in names:
                names.append(match[1])
            return f"${names.index(match[1]) + 1}"

        numbered = _PLACEHOLDER.sub(number, text)
        return cls(numbered.encode(), tuple(names), has_plan)

    def with_values(self, **values: str | bytes | None) -> "Step":
        given = [values[name] for name in self.parameters]
        return Step(self, [one.encode() if isinstance(one, str) else one for one in given])


@dataclass(frozen=True, slots=True)
class Step:
    """A statement with its values; without any (None), the server parses it and does not run it."""

    statement: Statement
    values: Sequence[Value] | None = ()

    def __post_init__(self) -> None:
        # libpq silently ends a text at its first NUL.
        if self.values and any(value is not None and b"\0" in value for value in self.values):
            raise ValueError("a NUL character, which Postgres cannot keep")


class Reply:
    """The answer to a step that went out with others: its result, or the error with which it failed.

    Attributes:
        error: that error; None: it did not fail.
        behind: the libpq results of the steps behind it.
    """

    __slots__ = ("_result", "behind", "error")

    def __init__(self, result: Any = None, error: BaseException | None = None, behind: Sequence[Any] = ()) -> None:
        self._result = result
        self.error = error
        self.behind = behind

    def result(self) -> Any:
        """Return the libpq result, or raise the step's ``psycopg.Error``."""
        if self.error is not None:
            raise self.error
        return self._result


class StepFailed(Exception):
    """A step failed, and those after it were skipped; the cause is psycopg's error.

    Attributes:
        number: the step's, from 0.
        error: the step's.
    """

    def __init__(self, number: int, error: psycopg.Error) -> None:
        super().__init__(f"step {number} has failed: {error}")
        self.number = number
        self.error = error


class PreparedLost(Exception):
    """What was prepared on the connection is lost. The transaction is aborted and has to run again.

    This comes with BEGIN, where ``commit_guard.begin`` begins once more; or with COMMIT, if the connection was used in
    between.
    """


def run_steps(connection: Connection, steps: Sequence[Step]) -> list[Any]:
    """Run statements in one round trip, and return their libpq results.

    Raises:
        StepFailed: from the ``psycopg.Error`` of the statement that failed.
        PreparedLost: a statement has to be prepared again; nothing after it has run.
        psycopg.OperationalError: the connection was lost.
        UnicodeEncodeError: the connection's encoding is not UTF-8, and lacks a character.
    """
    driver = driver_of(connection)
    pgconn = driver.pgconn
    prepared = _prepared.setdefault(driver, set()) if driver.prepare_threshold is not None else None
    encoding = "utf-8"
    if pgconn.parameter_status(b"client_encoding") != b"UTF8" and (encoding := driver.info.encoding) not in _AS_UTF8:
        steps = [_encoded(step, encoding) for step in steps]
    lock = driver.lock  # which psycopg's own cursors take, too
    _waited(driver, lock.acquire())
    try:
        pgconn.enter_pipeline_mode()
        asked: list[tuple[Statement, bool]] = []  # for each answer: its statement, and whether it is only to the Parse
        for step in steps:
            statement = step.statement
            if step.values is None:
                pgconn.send_prepare(b"", statement.text)
            elif prepared is None or not statement.has_plan:
                pgconn.send_query_params(statement.text, step.values)
            else:
                if statement.name not in prepared:
                    pgconn.send_prepare(statement.name, statement.text)
                    asked.append((statement, True))
                pgconn.send_query_prepared(statement.name, step.values)
            asked.append((statement, False))
        pgconn.pipeline_sync()
        try:
            answers = _waited(driver, driver.wait(_answers(pgconn)))
        finally:  # also if it is cancelled: psycopg then has the server stop, and reads everything it still sends
            if not driver.closed:
                _leave_pipeline(pgconn)
    finally:
        lock.release()
    results: list[Any] = []
    for answer, (statement, is_parse) in zip(answers, asked, strict=False):  # after a fatal error, some are missing
        if answer.status not in _DONE:
            error = psycopg.errors.error_from_result(answer, encoding=encoding)
            if prepared is not None and statement.has_plan and error.sqlstate in _NOT_AS_PREPARED:
                # Another client of a pooler's server prepared it, or it is gone.
                prepared.add(statement.name) if is_parse else prepared.clear()
                raise PreparedLost from error
            raise StepFailed(len(results), error) from error
        if not is_parse:
            results.append(answer)
        elif prepared is not None:
            prepared.add(statement.name)
    return results


def _leave_pipeline(pgconn: Any) -> None:
    """Leave pipeline mode, in which psycopg's own statements fail or hang; close a connection that cannot leave it."""
    try:
        pgconn.exit_pipeline_mode()
    except psycopg.OperationalError:  # answers were not read
        pgconn.finish()


def _encoded(step: Step, encoding: str) -> Step:
    """Return a step in the connection's encoding, which the host chose."""
    statement = step.statement
    text = statement.text.decode().encode(encoding)
    values = step.values and [None if one is None else one.decode().encode(encoding) for one in step.values]
    return Step(Statement(text, statement.parameters, statement.has_plan), values)


def row_of(connection: Connection, result: Any) -> tuple[Any, ...] | None:
    """Return the first row of a result; None if it has none."""
    return next(iter(rows_of(connection, result)), None)


def rows_of(connection: Connection, result: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a result, with values as psycopg itself reads them, whatever the host has registered."""
    driver = driver_of(connection)
    reader = reader_of(driver)
    reader.set_pgresult(result)
    rows: list[tuple[Any, ...]] = reader.load_rows(0, result.ntuples, tuple)
    return rows


def _waited(driver: Any, result: Any) -> Any:
    """Return a result; if it comes from an async connection, wait for it in the greenlet."""
    return wait_for(result) if isinstance(driver, psycopg.AsyncConnection) else result


def _answers(pgconn: Any) -> Any:
    """Send what is queued, and read answers up to that to Sync; a generator for psycopg's ``wait``."""
    yield from generators.send(pgconn)
    answers: list[Any] = []
    while True:
        try:
            answer = yield from generators.fetch(pgconn)
        except psycopg.Error:
            if answers and answers[-1].status not in _DONE:
                return answers  # the server has said why it closes the connection
            raise
        if answer is None:  # ends the answers to one statement
            continue
        if answer.status == ExecStatus.PIPELINE_SYNC:
            return answers
        answers.append(answer)


_NOT_AS_PREPARED = ("26000", "42P05")  # invalid_sql_statement_name, duplicate_prepared_statement
_AS_UTF8 = ("utf-8", "ascii")
"""psycopg's names of encodings in which we send text as UTF-8; ascii is SQL_ASCII, which converts nothing."""

_DONE = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)
_PLACEHOLDER = re.compile(r"%%|%\((\w+)\)s")
_prepared: "WeakKeyDictionary[Any, set[bytes]]" = WeakKeyDictionary()
"""By driver connection, the names of what was prepared on it."""
