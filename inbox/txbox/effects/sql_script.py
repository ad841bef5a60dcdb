"""A script of SQL over ``fresh_event``: its statements, and how each one sees that relation.

Where possible, ``fresh_event`` is a common table expression over arrays in front of a statement: nothing is created,
and the plan is kept. Statements that allow none (DO, CALL, LOCK and so on) see a temporary table instead.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from txbox.effects.fields import Field
from txbox.errors import InvalidConfiguration
from txbox.postgres.sql import quote, unescaped

FRESH_EVENT = "fresh_event"
"""The relation with a row for each message that is first."""


def with_rows(statement: str, fields: Mapping[str, Field]) -> str:
    """Return a statement with ``fresh_event`` as a common table expression in front; its parameters are arrays.

    $1 holds the ids, $2 and up the values of the fields, in their order. The statement must allow such an expression.
    """
    names = ", ".join(["message_id", *(unescaped(quote(name)) for name in fields)])
    expression = f"{FRESH_EVENT} ({names}) AS ({_rows(fields)})"
    started = _WITH.match(statement)
    if started is None:
        return f"WITH {expression} {statement}"
    return f"{started[0]} {expression},{statement[started.end() :]}"


def create_table(fields: Mapping[str, Field]) -> str:
    """Return the statement that creates ``fresh_event`` as a table of the transaction."""
    columns = "".join(f", {unescaped(quote(name))} {one.of.name}" for name, one in fields.items())
    return f'CREATE TEMPORARY TABLE {FRESH_EVENT} (message_id text COLLATE "C" NOT NULL{columns}) ON COMMIT DROP'


def fill_table(fields: Mapping[str, Field]) -> str:
    """Return the statement that fills that table; its parameters are those of ``with_rows``."""
    return f"INSERT INTO pg_temp.{FRESH_EVENT} {_rows(fields)}"


def _rows(fields: Mapping[str, Field]) -> str:
    arrays = ["$1::text[]", *(f"${number}::{one.of.name}[]" for number, one in enumerate(fields.values(), start=2))]
    values = [f"c{number}" for number in range(1, len(arrays) + 1)]
    first, *others = values
    selected = ", ".join([f'{first} COLLATE "C"', *others])
    return f"SELECT {selected} FROM unnest({', '.join(arrays)}) AS given ({', '.join(values)})"  # noqa: S608 - no names


_WITH = re.compile(r"WITH(?:\s+RECURSIVE\b)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ScriptStatement:
    """One statement.

    Attributes:
        text: without the semicolon.
        start: where the text begins in the script, in characters from 0.
        line: the line where the text begins in the script, from 1.
        verb: its first word, in capitals; empty if there is none.
        reads_events: whether it names ``fresh_event``.
        names_temporary: whether it names it as a temporary table.
    """

    text: str
    start: int
    line: int
    verb: str
    reads_events: bool
    names_temporary: bool

    @property
    def takes_expression(self) -> bool:
        """Whether a common table expression may be put in front of it; such a statement cannot end a transaction."""
        return self.may_return_rows and not self.names_temporary

    @property
    def may_return_rows(self) -> bool:
        """Whether it is of a kind that can return rows; no statement of that kind ends the transaction."""
        return self.verb in _TAKES_EXPRESSION

    @property
    def controls_transaction(self) -> bool:
        """Whether it begins or ends a transaction or a savepoint, which an effect may not."""
        return self.verb in _CONTROLS_TRANSACTION or _PREPARES_TRANSACTION.match(self.text) is not None


def read_script(script: str) -> tuple[ScriptStatement, ...]:
    """Split a script at its semicolons; those in parentheses, as of a rule, and in BEGIN ATOMIC … END part nothing.

    Raises:
        InvalidConfiguration: it has no statement, a quote or a comment that does not end, or parameters.
    """
    statements: list[ScriptStatement] = []
    words: list[tuple[str, int]] = []
    before = ""
    temporary = reads = False
    parentheses = blocks = 0

    def end(at: int) -> None:
        nonlocal words, temporary, reads, parentheses, blocks
        if words:
            verb, begin = words[0]
            line = script.count("\n", 0, begin) + 1
            statements.append(ScriptStatement(script[begin:at], begin, line, verb.upper(), reads, temporary))
        words, temporary, reads, parentheses, blocks = [], False, False, 0, 0

    for token in _TOKEN.finditer(script):
        kind, text = token.lastgroup, token[0]
        if kind == "end":
            if parentheses <= 0 and not blocks:
                end(token.start())
        elif kind in ("word", "name", "symbol"):
            if kind == "symbol" and text in _OPENING:
                raise InvalidConfiguration(f"line {script.count(chr(10), 0, token.start()) + 1}: {text} is not closed")
            if kind != "name" and text[:1] == "$":
                raise InvalidConfiguration(f"the statements have a parameter {text}; values come from {FRESH_EVENT}")
            words.append((text, token.start()))
            parentheses += {"(": 1, ")": -1}.get(text, 0)
            upper = text.upper()
            if blocks:
                blocks += {"CASE": 1, "END": -1}.get(upper, 0)
            elif upper == "ATOMIC" and before.upper() == "BEGIN" and words[0][0].upper() == "CREATE":
                blocks = 1
            if _is_event(kind, text):
                if before == ".":
                    temporary = temporary or (len(words) > 2 and words[-3][0].lower() == "pg_temp")
                else:
                    reads = True
            before = text
        elif kind == "text":
            words.append((text, token.start()))
            before = text
    end(len(script))
    if not statements:
        raise InvalidConfiguration("there is no statement in it")
    return tuple(statements)


def _is_event(kind: str | None, text: str) -> bool:
    return (kind == "word" and text.lower() == FRESH_EVENT) or (kind == "name" and text == f'"{FRESH_EVENT}"')


_TAKES_EXPRESSION = frozenset({"INSERT", "UPDATE", "DELETE", "MERGE", "SELECT", "WITH", "VALUES"})
_CONTROLS_TRANSACTION = frozenset({"BEGIN", "START", "COMMIT", "END", "ABORT", "ROLLBACK", "SAVEPOINT", "RELEASE"})
_PREPARES_TRANSACTION = re.compile(r"PREPARE\s+TRANSACTION\b", re.IGNORECASE)
_OPENING = ("'", '"', "/*")
_TOKEN = re.compile(
    r"""
      (?P<text>[eE]'(?:[^'\\]|\\.|'')*' | '(?:[^']|'')*' | \$(?P<tag>(?:[^\W\d]\w*)?)\$.*?\$(?P=tag)\$)
    | (?P<name>"(?:[^"]|"")*")
    | (?P<comment>--[^\n]* | /\*(?:[^*/]|\*(?!/)|/(?!\*)|/\*(?:[^*/]|\*(?!/)|/(?!\*))*\*/)*\*/)
    | (?P<word>\$\d+ | [^\W\d][\w$]* | \d[\w.]*)
    | (?P<end>;)
    | (?P<symbol>/\* | [^\s])
    """,
    re.VERBOSE | re.DOTALL,
)
"""Comments may nest once; deeper ones are refused as not closed."""
