r"""The statement scanner: splits SQL text as Postgres does, from left to right.

Text in a string, a quoted name or a comment is not a statement, and where one of these ends depends on how it began:
``E'\''`` is a string of one quote, ``'\'`` one of a backslash. So no part can be read alone::

    SELECT E'\''; COMMIT; SELECT '1'      three statements
    SELECT '\''; COMMIT; SELECT '1'       an error; three with standard_conforming_strings=off

The setting applies to a whole text, which Postgres parses before it runs any of it. Postgres runs nothing of a text
that it cannot parse.

https://www.postgresql.org/docs/current/sql-syntax-lexical.html, and scan.l in the source of Postgres
"""

import re
from collections.abc import Iterator


def statements(sql: str, *, backslashes: bool = False) -> Iterator[str]:
    """Yield the statements of a text, with a space for each comment, and with empty strings.

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
