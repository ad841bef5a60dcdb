"""Conversion: turn a live inbox into one that rotates, or back into one table, while workers go on.

::

    one table ── column generation = 1 ── CHECK, not valid ── validated (online) ── the switch ──▶ rotating
    one table ◀── the switch ── no row in an older generation ── rows moved block by block (online) ── rotating

Each arrow is a separate transaction. A conversion that was interrupted goes on when it is run again. The switches take
the exclusive lock as a rotation does (``txbox.maintenance.rotation.generations``), and read no rows.

Every snapshot sees a moved row in one place: in the older generation, by ``processed_earlier``, or in the current one.
A snapshot older than the switch back looks for older generations that are gone. The primary key then has the row, which
is younger than the snapshot: 40001.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, Row

from txbox.backoff import Backoff, retry
from txbox.errors import InvalidConfiguration, SchemaMissing
from txbox.maintenance.rotation.generations import TRIES, Generations
from txbox.maintenance.transactions import is_contended
from txbox.postgres.engines import adopt
from txbox.postgres.server import SERVER
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import short_transaction
from txbox.schema import prefix_problem

BLOCKS_AT_ONCE = 64
"""Blocks whose rows one transaction moves: some thousands of rows."""

LETTERS_AT_ONCE = 500
"""Rows of letters that one transaction moves."""

ROW_LOCK_MS = 2_000
"""How long a transaction that moves rows waits for a locked row."""

AGAIN = Backoff(first_seconds=0.05, longest_seconds=1.0)


class ConversionStatements(SqlFile, file="conversion.sql"):
    form: str
    hindrances: str
    add_generation: str
    add_check: str
    validate_check: str
    make_rotating: str
    older_generations: str
    move_rows: str
    move_lettered: str
    is_empty: str
    make_plain: str
    drop_generation_column: str


class InboxConversion:
    """Turns an inbox into a rotating one, or back. Needs the rights of the tables' owner."""

    def __init__(
        self,
        engine: Engine,
        *,
        schema: str | None = None,
        prefix: str = "",
        wait: Callable[[float], bool | None] = time.sleep,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Store where the tables are.

        Args:
            engine: where transactions are opened.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
            wait: pauses for this many seconds; returns whether to give up.
            say: called with each step that is done.
        """
        self._engine = adopt(engine)
        self._prefix = prefix
        self._sql = ConversionStatements.load(schema, prefix)
        self._generations = Generations(engine, schema=schema, prefix=prefix, wait=wait)
        self._wait = wait
        self._say = say

    def rotating(self) -> bool:
        """Return whether the inbox rotates.

        Raises:
            SchemaMissing: there is no inbox.
        """
        return bool(self._form().partitioned)

    def hindrances(self) -> list[str]:
        """Return, in words, what others have attached to the inbox and a conversion would break."""
        with short_transaction(self._engine) as connection:
            return list(connection.exec_driver_sql(self._sql.hindrances).scalars())

    def forward(self, *, tries: int = TRIES) -> bool:
        """Turn the inbox into a rotating one. Resumes an interrupted conversion; leaves a rotating inbox alone.

        Args:
            tries: how often each lock is tried.

        Returns:
            False if transactions that use the inbox did not end in time; run it again.

        Raises:
            SchemaMissing: there is no inbox.
            InvalidConfiguration: others have attached something to the table that would be left behind; or the prefix
                is too long for the names of generations.
        """
        if problem := prefix_problem(self._prefix):
            raise InvalidConfiguration(f"{problem}, and those of generations are longer than their table's")
        form = self._form()
        if form.partitioned:
            return True
        self._refuse_hindrances()
        if not form.has_generation:
            if not self._exclusively(self._sql.add_generation, tries):
                return False
            self._say("column generation added")
        if not form.has_check and not self._exclusively(self._sql.add_check, tries):
            return False
        if not form.is_valid:
            with self._without_time_limit() as connection:
                connection.exec_driver_sql(self._sql.validate_check)
            self._say("every row is of generation 1")
        self._refuse_hindrances()
        if not self._exclusively(self._sql.make_rotating, tries):
            return False
        self._say("the inbox rotates")
        return True

    def back(self, *, tries: int = TRIES) -> bool:
        """Turn the inbox into one table again, after moving older generations into the current one.

        Args:
            tries: how often each lock is tried.

        Returns:
            False if transactions that use the inbox did not end in time; run it again.

        Raises:
            SchemaMissing: there is no inbox.
            InvalidConfiguration: others have attached something to the table that would be lost.
        """
        form = self._form()
        if not form.partitioned:
            return not form.has_generation or self._exclusively(self._sql.drop_generation_column, tries)
        self._refuse_hindrances()
        for _ in range(tries):
            self._move_older(tries)
            self._generations.drop_detached(tries=tries)
            if not self._exclusively(self._sql.make_plain, tries):
                return False
            if not self.rotating():
                self._say("the inbox is one table")
                return True
            if self._wait(AGAIN.seconds(tries)):  # letters are being redriven, or a maintainer works
                break
        return False

    def _move_older(self, tries: int) -> None:
        """Move the rows of each older generation into the current one, and drop the older one when it is empty."""
        with short_transaction(self._engine) as connection:
            older = connection.exec_driver_sql(self._sql.older_generations).all()
        for generation, closed_at, blocks in older:
            rows = 0
            while moved := self._move(self._sql.move_lettered, {"generation": generation, "most": LETTERS_AT_ONCE}):
                rows += moved
            for first in range(0, blocks, BLOCKS_AT_ONCE):
                places = {"first_row": f"({first},0)", "end_row": f"({first + BLOCKS_AT_ONCE},0)"}
                rows += self._move(self._sql.move_rows, {"generation": generation, **places})
            if rows:
                self._say(f"{rows} rows of generation {generation} moved")
            with self._without_time_limit() as connection:
                empty = connection.exec_driver_sql(self._sql.is_empty, {"generation": generation}).scalar_one()
            if empty:
                self._generations.drop(generation, closed_at, tries=tries)

    def _move(self, statement: str, values: dict[str, object]) -> int:
        def work() -> int:
            with short_transaction(self._engine) as connection:
                connection.exec_driver_sql(SERVER.bound_wait, {"lock_timeout": f"{ROW_LOCK_MS}ms"})
                return connection.exec_driver_sql(statement, values).rowcount

        return retry(work, again=lambda error, _: is_contended(error), backoff=AGAIN, runs=TRIES, wait=self._wait)

    @contextmanager
    def _without_time_limit(self) -> Iterator[Connection]:
        """Begin a transaction for reading a whole table without locking anybody out."""
        with short_transaction(self._engine) as connection:
            connection.exec_driver_sql(SERVER.no_time_limit)
            yield connection

    def _exclusively(self, statement: str, tries: int) -> bool:
        def change(connection: Connection) -> None:
            connection.exec_driver_sql(statement)

        return self._generations.exclusively(change, tries=tries)

    def _form(self) -> Row[Any]:
        with short_transaction(self._engine) as connection:
            form = connection.exec_driver_sql(self._sql.form).one_or_none()
        if form is None:
            raise SchemaMissing(self._sql.name_of("processed_message"))
        return form

    def _refuse_hindrances(self) -> None:
        if found := self.hindrances():
            raise InvalidConfiguration(
                f"{self._sql.name_of('processed_message')} is used by what would be left with one generation of it, or "
                f"be lost: {', '.join(found)}. Drop that first, and make it again on the converted table"
            )
