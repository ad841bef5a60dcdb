"""The operation of our migrations: it runs a step of txbox's tables on the connection that Django migrates."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import psycopg
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from django.conf import settings
from django.core.management.base import CommandError
from django.db import router
from django.db.migrations.operations.base import Operation
from sqlalchemy import Connection, Engine, StaticPool, inspect, make_url
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.schema import CreateSchema

import txbox_migrations
from txbox_migrations.steps import BASELINE


class MigrationStep(Operation):
    """Brings txbox's tables from the version before to a version, and back; it knows no models.

    Steps that are there already are skipped, such as those of ``txbox db upgrade``. The settings ``TXBOX_SCHEMA`` and
    ``TXBOX_PREFIX`` say where the tables are; a schema that is missing is created.
    """

    reversible = True
    reduces_to_sql = True

    def __init__(self, version: int) -> None:
        self.version = version
        self._before = version - 1 if version > BASELINE else 0

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return how it is made."""
        return type(self).__qualname__, [self.version], {}

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing of Django's models."""

    def database_forwards(self, app_label: str, schema_editor: Any, *_states: Any) -> None:
        """Run the step."""
        self._run(txbox_migrations.upgrade, app_label, schema_editor, to=self.version, since=self._before)

    def database_backwards(self, app_label: str, schema_editor: Any, *_states: Any) -> None:
        """Take it back."""
        self._run(txbox_migrations.downgrade, app_label, schema_editor, to=self._before, since=self.version)

    def describe(self) -> str:
        """Return what it does."""
        return f"txbox's tables, version {self.version}"

    def _run(self, change: Callable[..., None], app_label: str, schema_editor: Any, *, to: int, since: int) -> None:
        connection = schema_editor.connection
        if connection.vendor != "postgresql" or not router.allow_migrate(connection.alias, app_label):
            return
        where = {"schema": getattr(settings, "TXBOX_SCHEMA", None), "prefix": getattr(settings, "TXBOX_PREFIX", "")}
        if schema_editor.collect_sql:  # for `manage.py sqlmigrate`
            sql = StringIO()
            context = MigrationContext.configure(dialect_name="postgresql", opts={"as_sql": True, "output_buffer": sql})
            if where["schema"] is not None and since == 0:
                context.impl.execute(CreateSchema(where["schema"], if_not_exists=True))
            change(Operations(context), to=to, since=since, **where)
            schema_editor.collected_sql.append(sql.getvalue().strip())
            return
        connection.ensure_connection()
        with _borrowed(connection.connection) as borrowed:
            if where["schema"] is not None and to > since and not inspect(borrowed).has_schema(where["schema"]):
                borrowed.execute(CreateSchema(where["schema"]))
            try:
                change(Operations(MigrationContext.configure(borrowed)), to=to, **where)
            except txbox_migrations.MigrationError as error:  # so that `migrate` ends with one line
                raise CommandError(str(error)) from error


class _BorrowingDialect(PGDialect_psycopg):
    """Ends no transaction: it is Django's. (Nothing here would commit it.)"""

    supports_statement_cache = True

    def do_rollback(self, dbapi_connection: Any) -> None:
        """Leave it to Django."""


@contextmanager
def _borrowed(driver: Any) -> Iterator[Connection]:
    """Use a connection of Django's with SQLAlchemy, in the transaction that it is in."""
    dialect: Any = _BorrowingDialect(dbapi=psycopg)  # type: ignore[no-untyped-call]
    pool = StaticPool(lambda: driver, reset_on_return=None, dialect=dialect)
    factory, driver.cursor_factory = driver.cursor_factory, psycopg.Cursor
    try:
        with Engine(pool, dialect, make_url("postgresql+psycopg://")).connect() as connection:
            dialect.initialize(connection)
            yield connection
    finally:
        driver.cursor_factory = factory
