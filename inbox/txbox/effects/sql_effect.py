"""The SQL effect: what messages do, as a script over ``fresh_event``; one file for workers, Lambda and bulk loads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import psycopg

from txbox.effects.fields import Field, read_fields
from txbox.effects.fresh_event import FRESH_EVENT, create_table, fill_table, with_rows
from txbox.effects.json_rows import Row, RowReader
from txbox.effects.sql_script import ScriptStatement, read_script
from txbox.errors import EffectFailed, InvalidConfiguration
from txbox.message import Message
from txbox.postgres.round_trip import Statement, Step
from txbox.postgres.sql import array_literal, in_one_statement


class SqlEffect:
    """Statements of SQL that apply messages, given as the rows of the relation ``fresh_event``.

    ::

        -- account.sql
        INSERT INTO account (customer_id, cents)
        SELECT customer_id, sum(cents) FROM fresh_event GROUP BY customer_id ORDER BY customer_id
        ON CONFLICT (customer_id) DO UPDATE SET cents = account.cents + excluded.cents

        effect = SqlEffect("account.sql", fields={"customer_id": "text", "cents": "bigint"})
        SqsWorker(queue_url, inbox=Inbox("billing"), engine=engine, effect=effect).run()

    ``fresh_event`` has a row for each message that is processed for the first time: ``message_id`` and the fields. The
    statements are run for many messages at once, so they have to be right for one row as for a thousand.
    """

    def __init__(self, path: str | Path, *, fields: Mapping[str, Field | str] | str) -> None:
        """Read the statements from a file.

        Args:
            path: the file, in UTF-8.
            fields: the columns of ``fresh_event`` beside ``message_id``, by name: each a ``Field``, or its definition
                as text, ``"text at /customer/id not null"``; or all of them as one text, as for ``--fields``.

        Raises:
            InvalidConfiguration: the file cannot be read, or something in it or in the fields cannot work.
        """
        try:
            script = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfiguration(f"the effect {path} cannot be read: {error}") from error
        self._set(script, fields, Path(path).name)

    @classmethod
    def of(cls, script: str, *, fields: Mapping[str, Field | str] | str) -> Self:
        """Make one of statements that are not in a file; arguments and errors are as for a file's."""
        made = cls.__new__(cls)
        made._set(script, fields, "the statements")  # noqa: SLF001 - of this class
        return made

    def _set(self, script: str, fields: Mapping[str, Field | str] | str, name: str) -> None:
        self.script = script
        self.fields: Mapping[str, Field] = read_fields(fields)
        self.name = name
        try:
            statements = read_script(script)
        except InvalidConfiguration as error:
            raise InvalidConfiguration(f"{name}: {error}") from error
        if not any(one.reads_events or one.names_temporary for one in statements) and FRESH_EVENT not in script.lower():
            raise InvalidConfiguration(
                f"{name} does not name {FRESH_EVENT}, so messages would be recorded without effect"
            )
        self._rows = RowReader(self.fields)
        self._columns = [one.of for one in self.fields.values()]
        self.creates_table = not all(one.takes_expression for one in statements)
        """Whether it needs a temporary table in each transaction, which costs several times as much."""
        self._steps = self._by_table() if self.creates_table else [self._embedded(one) for one in statements]

    def __repr__(self) -> str:
        return f"SqlEffect({self.name!r}, fields={list(self.fields)})"

    def __reduce__(self) -> tuple[object, ...]:
        return _make, (self.script, dict(self.fields), self.name)

    def read(self, message: Message) -> Row:
        """Return a message's row.

        Raises:
            MalformedMessage: the body is not one JSON object in UTF-8, or a value is not of its field's type.
        """
        return self._rows.read(message)

    def steps(self, message_ids: Sequence[str], rows: Sequence[Row]) -> list[Step]:
        """Return what applies messages, given by ids and rows in one order, in the transaction that records them."""
        columns: list[tuple[str | None, ...]] = list(zip(*rows, strict=True))
        values = [array_literal(message_ids).encode()]
        values += [
            array_literal(column, quoted=of.quoted).encode() for column, of in zip(columns, self._columns, strict=True)
        ]
        return [Step(one.statement, values if one.takes_rows else ()) for one in self._steps]

    def failed(self, number: int, error: psycopg.Error) -> EffectFailed:
        """Return the error that says which of its steps has failed, and where."""
        step = self._steps[number]
        diagnostic = error.diag
        if diagnostic.message_primary is None:
            return EffectFailed(f"{self.name} failed: {error}")
        if diagnostic.sqlstate == _FEATURE_NOT_SUPPORTED and "EXECUTE of transaction" in diagnostic.message_primary:
            return EffectFailed(
                f"{self.name} failed: its transaction is not its own; leave BEGIN, COMMIT, ROLLBACK and SAVEPOINT out"
            )
        line = step.line
        if diagnostic.internal_query == self.script and diagnostic.internal_position is not None:
            line = self.script.count("\n", 0, int(diagnostic.internal_position) - 1) + 1
        elif step.text and diagnostic.statement_position is not None:
            line += step.text.count("\n", 0, int(diagnostic.statement_position) - 1)
        return EffectFailed(f"{self.name}, line {line}: {diagnostic.message_primary}")

    def _embedded(self, one: ScriptStatement) -> "_EffectStep":
        text = with_rows(one.text, self.fields) if one.reads_events else one.text
        return _EffectStep(Statement(text.encode()), one.reads_events, one.line, text)

    def _by_table(self) -> "list[_EffectStep]":
        return [
            _EffectStep(Statement(create_table(self.fields).encode(), has_plan=False), takes_rows=False),
            _EffectStep(Statement(fill_table(self.fields).encode(), has_plan=False), takes_rows=True),
            _EffectStep(Statement(in_one_statement(self.script).encode(), has_plan=False), takes_rows=False),
        ]


class _EffectStep:
    """One step of an effect: its statement, whether it takes the rows, and where in the script it comes from."""

    __slots__ = ("line", "statement", "takes_rows", "text")

    def __init__(self, statement: Statement, takes_rows: bool, line: int = 1, text: str = "") -> None:
        self.statement, self.takes_rows, self.line, self.text = statement, takes_rows, line, text


def _make(script: str, fields: dict[str, Field], name: str) -> SqlEffect:
    made = SqlEffect.of(script, fields=fields)
    made.name = name
    return made


_FEATURE_NOT_SUPPORTED = "0A000"
