"""The SQL effect: a script over ``fresh_event`` says what messages do; one file for workers, Lambda and bulk loads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox.effects.fields import Field, read_fields
from txbox.effects.json_rows import Row, RowReader
from txbox.effects.publication import Publication, ReturnedRows
from txbox.effects.sql_script import FRESH_EVENT, ScriptStatement, create_table, fill_table, read_script, with_rows
from txbox.errors import EffectFailed, InvalidConfiguration
from txbox.messages.message import Message
from txbox.outbox import Outbox
from txbox.postgres.round_trip import Statement, Step
from txbox.postgres.sql import array_literal, in_one_statement
from txbox.postgres.sqlstates import SYNTAX_ERROR, is_outage, sqlstate
from txbox.postgres.transactions import parse


class SqlEffect:
    """SQL statements that apply messages, which they read as rows of the relation ``fresh_event``.

    ::

        -- account.sql
        INSERT INTO account (customer_id, cents)
        SELECT customer_id, sum(cents) FROM fresh_event GROUP BY customer_id ORDER BY customer_id
        ON CONFLICT (customer_id) DO UPDATE SET cents = account.cents + excluded.cents

        effect = SqlEffect("account.sql", fields={"customer_id": "text", "cents": "bigint"})
        SqsWorker(queue_url, inbox=Inbox("billing"), engine=engine, effect=effect).run()

    ``fresh_event`` has a row for each message that is processed for the first time: ``message_id`` and the fields. The
    statements run for many messages at once, so they must be right for one row as well as for a thousand.

    With an outbox, the rows that the last statement returns are published in the same transaction.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fields: Mapping[str, Field | str] | str,
        outbox: Outbox | None = None,
        destination: str | None = None,
    ) -> None:
        """Read the statements from a file.

        Args:
            path: the file, in UTF-8.
            fields: the columns of ``fresh_event`` beside ``message_id``, by name: each a ``Field``, or its definition
                as text, ``"text at /customer/id not null"``; or all of them as one text, as for ``--fields``.
            outbox: takes a message for each row that the last statement returns: ``body`` and, optionally, ``key``,
                ``destination``, ``headers`` (a JSON object of texts), ``message_id`` and ``delay`` (an interval, or
                seconds). None: nothing is published, and what statements return is ignored.
            destination: for messages whose row names none, as in ``Outgoing``.

        Raises:
            InvalidConfiguration: the file cannot be read, or something in it or in the fields cannot work.
        """
        try:
            script = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfiguration(f"the effect {path} cannot be read: {error}") from error
        self._set(script, fields, Path(path).name, outbox, destination)

    @classmethod
    def of(
        cls,
        script: str,
        *,
        fields: Mapping[str, Field | str] | str,
        outbox: Outbox | None = None,
        destination: str | None = None,
    ) -> Self:
        """Return an effect of statements that are not in a file; arguments and errors are as for a file's."""
        return cls._make(script, fields, "the statements", outbox, destination)

    @classmethod
    def _make(cls, *arguments: Any) -> Self:
        made = cls.__new__(cls)
        made._set(*arguments)  # noqa: SLF001 - of this class
        return made

    def _set(
        self,
        script: str,
        fields: Mapping[str, Field | str] | str,
        name: str,
        outbox: Outbox | None,
        destination: str | None,
    ) -> None:
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
        self._publication = _publication(name, statements[-1], outbox, destination)
        self._rows = RowReader(self.fields)
        self._columns = [one.of for one in self.fields.values()]
        self.creates_table = not all(one.takes_expression for one in statements)
        """Whether it needs a temporary table in each transaction, which costs several times as much."""
        self._on_table = self._over_table(statements)
        self._checked = [self._by_itself(one) for one in statements]
        self._controls_transaction = next((one.line for one in statements if one.controls_transaction), None)
        self._steps = [*self._filling_table(), *self._on_table] if self.creates_table else self._checked

    def __repr__(self) -> str:
        return f"SqlEffect({self.name!r}, fields={list(self.fields)})"

    def __reduce__(self) -> tuple[object, ...]:
        outbox, destination = None, None
        if self._publication is not None:
            outbox, destination = self._publication.outbox, self._publication.destination
        return type(self)._make, (self.script, dict(self.fields), self.name, outbox, destination)

    @property
    def publishes(self) -> bool:
        """Whether the rows that its last statement returns are published."""
        return self._publication is not None

    def check(self, connection: Connection) -> None:
        """Raise unless the statements fit the tables on this connection, and the effect can publish if it has to.

        Of statements that need a temporary table, only the syntax is checked: they may create what others name.

        Raises:
            EffectFailed: the server refuses a statement, such as one that names a table that does not exist.
            NotInTransaction, SchemaMissing: as for ``Outbox.check``.
        """
        if self._controls_transaction is not None:
            raise EffectFailed(f"{self.name}, line {self._controls_transaction}: {_NOT_ITS_OWN}")
        for step in self._checked:
            try:
                with connection.begin_nested():
                    parse(connection, step.statement)
            except DBAPIError as error:
                if not isinstance(error.orig, psycopg.Error) or is_outage(error):
                    raise
                if not self.creates_table or sqlstate(error) == SYNTAX_ERROR:
                    raise self._failed(step, error.orig) from error.orig
        if self._publication is not None:
            self._publication.outbox.check(connection)

    def read(self, message: Message) -> Row:
        """Return a message's row.

        Raises:
            MalformedMessage: the body is not one JSON object in UTF-8, or a value does not fit its field's type.
        """
        return self._rows.read(message)

    def steps(self, message_ids: Sequence[str], rows: Sequence[Row]) -> list[Step]:
        """Return the steps that apply messages, in the transaction that records them; ids and rows have one order."""
        columns: list[tuple[str | None, ...]] = list(zip(*rows, strict=True))
        values = [array_literal(message_ids).encode()]
        values += [
            array_literal(column, quoted=of.quoted).encode() for column, of in zip(columns, self._columns, strict=True)
        ]
        return [Step(one.statement, values if one.takes_rows else ()) for one in self._steps]

    def publish(self, connection: Connection, result: Any) -> None:
        """Publish the rows that the last step returned, in the transaction in which it ran.

        Args:
            connection: the one on which it ran.
            result: that step's libpq result; None if it has none.

        Raises:
            EffectFailed: the rows are not messages; the text names the column.
            NotSendable, InvalidMessageId, InvalidConfiguration, SchemaMissing: as for ``Outbox.publish``.
        """
        if self._publication is None:
            return
        try:
            self._publication.publish(connection, ReturnedRows.of(connection, result))
        except EffectFailed as error:
            raise EffectFailed(f"{self.name}: {error}") from error.__cause__

    def apply_table(self, connection: Connection) -> None:
        """Apply and publish the rows of ``fresh_event`` where it is a table already, as in a bulk load.

        Raises:
            sqlalchemy.exc.DBAPIError: a statement failed; ``line_on_table`` says where.
            EffectFailed, NotSendable, InvalidMessageId, InvalidConfiguration, SchemaMissing: as for ``publish``.
        """
        for step in self._on_table:
            done = connection.exec_driver_sql(step.statement.text.decode().replace("%", "%%"))
        self.publish(connection, done.cursor.pgresult if done.returns_rows else None)

    def line_on_table(self, error: psycopg.Error) -> int | None:
        """Return the line of the script in which ``apply_table`` failed; None if it is not known."""
        lines = (self._line(step, error) for step in self._on_table)
        return next((line for line in lines if line is not None), None)

    def failed(self, number: int, error: psycopg.Error) -> EffectFailed:
        """Return the error that says which step failed, and where."""
        return self._failed(self._steps[number], error)

    def _failed(self, step: "_EffectStep", error: psycopg.Error) -> EffectFailed:
        diagnostic = error.diag
        if diagnostic.message_primary is None:
            return EffectFailed(f"{self.name} failed: {error}")
        if diagnostic.sqlstate == _FEATURE_NOT_SUPPORTED and "EXECUTE of transaction" in diagnostic.message_primary:
            return EffectFailed(f"{self.name} failed: {_NOT_ITS_OWN}")
        return EffectFailed(f"{self.name}, line {self._line(step, error) or step.line}: {diagnostic.message_primary}")

    def _line(self, step: "_EffectStep", error: psycopg.Error) -> int | None:
        diagnostic = error.diag
        if diagnostic.internal_query is None:
            position = None if step.is_block else diagnostic.statement_position
        else:
            position = diagnostic.internal_position if diagnostic.internal_query == step.text else None
        return None if position is None else step.line + step.text.count("\n", 0, int(position) - 1)

    def _by_itself(self, one: ScriptStatement) -> "_EffectStep":
        embeds = one.reads_events and not self.creates_table
        text = with_rows(one.text, self.fields) if embeds else one.text
        return _EffectStep(Statement(text.encode()), embeds, one.line, text)

    def _filling_table(self) -> "list[_EffectStep]":
        return [
            _EffectStep(Statement(create_table(self.fields).encode(), has_plan=False)),
            _EffectStep(Statement(fill_table(self.fields).encode(), has_plan=False), takes_rows=True),
        ]

    def _over_table(self, statements: Sequence[ScriptStatement]) -> "list[_EffectStep]":
        """Return the steps where ``fresh_event`` is a table: one, unless the last statement's rows are published."""
        if not self.publishes:
            return [_block(self.script)]
        last = statements[-1]
        before = [_block(self.script[: last.start])] if len(statements) > 1 else []
        return [*before, _EffectStep(Statement(last.text.encode(), has_plan=False), False, last.line, last.text)]


class _EffectStep:
    """One step of an effect: its statement, whether it takes the rows, and where in the script its text starts."""

    __slots__ = ("is_block", "line", "statement", "takes_rows", "text")

    def __init__(
        self, statement: Statement, takes_rows: bool = False, line: int = 1, text: str = "", *, is_block: bool = False
    ) -> None:
        self.statement, self.takes_rows, self.line, self.text = statement, takes_rows, line, text
        self.is_block = is_block  # the text is wrapped in a statement of ours


def _block(script: str) -> _EffectStep:
    return _EffectStep(Statement(in_one_statement(script).encode(), has_plan=False), text=script, is_block=True)


def _publication(
    name: str, last: ScriptStatement, outbox: Outbox | None, destination: str | None
) -> Publication | None:
    if outbox is None:
        if destination is not None:
            raise InvalidConfiguration(f"{name}: a destination needs an outbox: SqlEffect(…, outbox=Outbox())")
        return None
    # To return its rows it runs by itself, outside the block in which the server refuses COMMIT.
    if not last.may_return_rows:
        raise InvalidConfiguration(
            f"{name}, line {last.line}: its last statement is {last.verb}, which returns no rows to publish; end it in "
            "SELECT …, or INSERT … RETURNING, with a column body"
        )
    return Publication(outbox, destination)


_FEATURE_NOT_SUPPORTED = "0A000"
_NOT_ITS_OWN = "its transaction is not its own; leave BEGIN, COMMIT, ROLLBACK and SAVEPOINT out"
