"""Run the steps between two versions through the operations of an alembic revision."""

from typing import Protocol

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import MetaData, Table, inspect

from txbox.postgres.engines import require_server
from txbox.postgres.sql import quoted, unescaped
from txbox_migrations.environment import VERSION_TABLE
from txbox_migrations.errors import MigrationError
from txbox_migrations.steps import BASELINE, LATEST, STEPS
from txbox_migrations.version_mark import current_version, require_prefix, require_version, write_version


class HasMigrationContext(Protocol):
    """The part of ``alembic.op`` that a revision needs: access to its migration context."""

    def get_context(self) -> MigrationContext:
        """Return the migration context of the running revision."""


def upgrade(
    op: HasMigrationContext, *, to: int = LATEST, schema: str | None = None, prefix: str = "", since: int | None = None
) -> None:
    """Bring our tables up to a version, inside a revision of your own alembic history.

    Steps that have already been run are skipped, so at version ``to`` or above nothing happens. Pass ``to`` explicitly,
    so that a released revision does the same for ever.

    Args:
        op: ``alembic.op``, or any ``Operations``.
        to: the version to reach, up to LATEST; 0: nothing happens.
        schema: the schema of the tables, which must exist; None: the connection's search path.
        prefix: put before the name of every table, index and constraint.
        since: the version the tables are at; None: read it from the database. Needed with ``--sql``.

    Raises:
        MigrationError: there is no such version, or the version in the database cannot be determined or is from before
            the baseline; or ``txbox db upgrade`` made the tables; or the prefix is too long.
        InvalidConfiguration: the database is not UTF-8.
    """
    operations = Operations(op.get_context())
    require_version("to", to)
    require_prefix(prefix)
    if not operations.migration_context.as_sql:
        require_server(operations.get_bind())
        _refuse_two_histories(operations, schema, prefix)
    for version in range(max(_since(operations, schema, prefix, since) + 1, BASELINE), to + 1):
        STEPS[version - BASELINE].upgrade(operations, schema, prefix)
        write_version(operations, version, schema=schema, prefix=prefix)


def downgrade(
    op: HasMigrationContext, *, to: int = 0, schema: str | None = None, prefix: str = "", since: int | None = None
) -> None:
    """Take our tables back down to a version; what the dropped tables held is lost.

    At version ``to`` or below nothing happens.

    Args:
        op: ``alembic.op``, or any ``Operations``.
        to: the version to reach, up to LATEST; 0: no tables.
        schema: the schema of the tables; None: the connection's search path.
        prefix: the prefix of every name.
        since: the version the tables are at; None: read it from the database. Needed with ``--sql``.

    Raises:
        MigrationError: there is no such version, or the version in the database cannot be determined or is from before
            the baseline; or ``txbox db upgrade`` made the tables.
    """
    operations = Operations(op.get_context())
    require_version("to", to)
    if not operations.migration_context.as_sql:
        _refuse_two_histories(operations, schema, prefix)
    since = _since(operations, schema, prefix, since)
    for version in range(since, max(to, BASELINE - 1), -1):
        STEPS[version - BASELINE].downgrade(operations, schema, prefix)
        if version > BASELINE:
            write_version(operations, version - 1, schema=schema, prefix=prefix)


def _refuse_two_histories(op: Operations, schema: str | None, prefix: str) -> None:
    """Raise if our own history manages the tables: a later step of yours would drop them behind its back."""
    table = Table(f"{prefix}{VERSION_TABLE}", MetaData(), schema=schema)
    if inspect(op.get_bind()).has_table(table.name, schema=schema):
        named = unescaped(quoted(table))
        raise MigrationError(
            f"`txbox db upgrade` manages txbox's tables, as {named} says, and two histories cannot. To hand them over "
            f"to yours, run DROP TABLE {named} (`txbox dev --no-tables` makes none); or leave this step out"
        )


def _since(op: Operations, schema: str | None, prefix: str, since: int | None) -> int:
    if since is not None:
        require_version("since", since)
        return since
    context = op.get_context()
    if context.as_sql or context.connection is None:
        raise MigrationError(
            "an offline run (--sql) cannot ask the database which version txbox's tables are at; "
            "pass since=N, the version they will be at when the script runs (0: no tables)"
        )
    return current_version(context.connection, schema=schema, prefix=prefix)
