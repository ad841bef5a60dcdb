"""The operation of our migrations: runs a step of txbox's tables on the connection that Django migrates."""

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
    """Brings txbox's tables from the version before to a version, and back. It has no models.

    Steps that have already been run, for example by an alembic history, are skipped. The settings ``TXBOX_SCHEMA``
    and ``TXBOX_PREFIX`` say where the tables are; a missing schema is created.
    """

    reversible = True
    reduces_to_sql = True

    def __init__(self, version: int) -> None:
        self.version = version
        self._before = version - 1 if version > BASELINE else 0

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return the operation's class, arguments and keyword arguments, for Django's migration writer."""
        return type(self).__qualname__, [self.version], {}

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Leave Django's models unchanged."""

    def database_forwards(self, app_label: str, schema_editor: Any, *_states: Any) -> None:
        self._run(txbox_migrations.upgrade, app_label, schema_editor, to=self.version, since=self._before)

    def database_backwards(self, app_label: str, schema_editor: Any, *_states: Any) -> None:
        self._run(txbox_migrations.downgrade, app_label, schema_editor, to=self._before, since=self.version)

    def describe(self) -> str:
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
    """Ends no transaction: the transaction is Django's, and nothing here may commit it."""

    supports_statement_cache = True

    def do_rollback(self, dbapi_connection: Any) -> None:
        """Leave the rollback to Django."""


@contextmanager
def _borrowed(driver: Any) -> Iterator[Connection]:
    """Use a Django connection with SQLAlchemy, in its current transaction."""
    dialect: Any = _BorrowingDialect(dbapi=psycopg)  # type: ignore[no-untyped-call]
    pool = StaticPool(lambda: driver, reset_on_return=None, dialect=dialect)
    factory, driver.cursor_factory = driver.cursor_factory, psycopg.Cursor
    try:
        with Engine(pool, dialect, make_url("postgresql+psycopg://")).connect() as connection:
            dialect.initialize(connection)
            yield connection
    finally:
        driver.cursor_factory = factory
