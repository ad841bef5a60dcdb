"""Run the steps between two versions through the operations of an alembic revision."""

from typing import Protocol

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, inspect

from txbox.postgres.engines import require_server
from txbox_migrations.errors import MigrationError
from txbox_migrations.steps import LATEST, STEPS
from txbox_migrations.version_mark import current_version, require_prefix, require_version, write_version


class HasMigrationContext(Protocol):
    """What ``alembic.op`` is to a revision: the way to its migration context."""

    def get_context(self) -> MigrationContext:
        """Return the migration context of the running revision."""


def upgrade(
    op: HasMigrationContext, *, to: int = LATEST, schema: str | None = None, prefix: str = "", since: int | None = None
) -> None:
    """Bring our tables up to a version, inside a revision of your own alembic history.

    Steps that are there already are skipped, so at version ``to`` or above nothing happens. Pass ``to`` explicitly:
    a released revision then does the same forever.

    Args:
        op: ``alembic.op``, or any ``Operations``.
        to: the version to reach, 0 (nothing happens) to LATEST.
        schema: the schema of the tables, which must exist; None: the connection's search path.
        prefix: put before the name of every table, index and constraint.
        since: the version the tables are at; None: read it from the database. Needed with ``--sql``.

    Raises:
        MigrationError: no such version, or the version in the database cannot be determined; or the prefix is too long.
        InvalidConfiguration: the database is not UTF-8.
    """
    operations = Operations(op.get_context())
    require_version("to", to)
    require_prefix(prefix)
    if not operations.migration_context.as_sql:
        require_server(operations.get_bind())
    for version in range(_since(operations, schema, prefix, since) + 1, to + 1):
        STEPS[version - 1].upgrade(operations, schema, prefix)
        write_version(operations, version, schema=schema, prefix=prefix)


def downgrade(
    op: HasMigrationContext, *, to: int = 0, schema: str | None = None, prefix: str = "", since: int | None = None
) -> None:
    """Take our tables back down to a version; what the dropped tables held is lost.

    At version ``to`` or below nothing happens.

    Args:
        op: ``alembic.op``, or any ``Operations``.
        to: the version to reach, 0 (no tables) to LATEST.
        schema: the schema of the tables; None: the connection's search path.
        prefix: the prefix of every name.
        since: the version the tables are at; None: read it from the database. Needed with ``--sql``.

    Raises:
        MigrationError: no such version, or the version in the database cannot be determined; or the inbox is rotating,
            which the version to reach does not know.
    """
    operations = Operations(op.get_context())
    require_version("to", to)
    since = _since(operations, schema, prefix, since)
    if to < _ROTATING_SINCE <= since and not operations.get_context().as_sql:
        _refuse_rotating(operations.get_bind(), schema, prefix)
    for version in range(since, to, -1):
        STEPS[version - 1].downgrade(operations, schema, prefix)
        if version > 1:
            write_version(operations, version - 1, schema=schema, prefix=prefix)


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


_ROTATING_SINCE = 7
"""The first version that knows a rotating inbox."""


def _refuse_rotating(connection: Connection, schema: str | None, prefix: str) -> None:
    inbox = f"{prefix}processed_message"
    if "generation" in {column["name"] for column in inspect(connection).get_columns(inbox, schema=schema)}:
        raise MigrationError(
            f"{inbox} is rotating, and versions below {_ROTATING_SINCE} do not know that; turn it back into one table "
            "first: txbox db rotate-inbox --back"
        )
