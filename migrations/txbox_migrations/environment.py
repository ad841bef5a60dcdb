"""Run our alembic history: its own version table, one transaction, and never two runs at once.

Both env.py files call this module: ``history/env.py`` for ``upgrade_database`` and ``migrations/env.py`` for
``alembic upgrade`` in the repository. The revisions are the files in ``steps``.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from alembic import context
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext, MigrationInfo
from sqlalchemy.engine import Connection
from sqlalchemy.schema import CreateSchema, DropTable

from txbox.postgres.engines import require_server
from txbox.schema import TABLE_NAMES
from txbox_migrations.errors import MigrationError
from txbox_migrations.steps import BASELINE, LATEST
from txbox_migrations.version_mark import before_baseline, current_version, write_version

VERSION_TABLE: Final = "txbox_version"
"""The table in which our alembic history keeps its revision, in the schema of our tables; the prefix goes before it."""

_MIGRATION_LOCK: Final = 0x7478626F78
"""The advisory lock of a run ("txbox" in ASCII). One for the whole database: runs are rare and short."""


@dataclass(frozen=True, slots=True)
class VersionChange:
    """What a run has done.

    Attributes:
        before: the version of the tables before the run; 0: there were none.
        after: the version after it; equal to ``before`` if there was nothing to do.
    """

    before: int
    after: int


def run_online(connection: Connection, *, schema: str | None, prefix: str) -> VersionChange:
    """Run the pending alembic command on a connection, in a transaction that this begins and commits.

    Args:
        connection: READ COMMITTED and not in a transaction. Once it has the lock, it must see what the previous run
            committed; a snapshot taken while waiting would not.
        schema: the schema of the tables, created if it does not exist; None: the connection's search path.
        prefix: the prefix of every name.

    Returns:
        The version before and after.

    Raises:
        MigrationError: another alembic history manages the tables, or a newer release made them, or they are from
            before the baseline.
        InvalidConfiguration: the database is not UTF-8.
    """
    require_server(connection)
    with connection.begin():
        context.configure(
            connection=connection,
            version_table=f"{prefix}{VERSION_TABLE}",
            version_table_schema=schema,
            on_version_apply=_write_mark,
        )
        migration = context.get_context()
        if "destination_rev" not in migration.opts:  # a command that only reads, such as `alembic current`
            before = _recorded_version(migration)
            _run(schema, prefix)
            return VersionChange(before, before)
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.cast(_MIGRATION_LOCK, sa.BigInteger))))
        if schema is not None and not sa.inspect(connection).has_schema(schema):
            if context.get_revision_argument() is None:  # a downgrade to nothing, where there is nothing
                return VersionChange(0, 0)
            connection.execute(CreateSchema(schema))
        before = _recorded_version(migration)
        _require_ours(before, connection, schema, prefix)
        _run(schema, prefix)
        after = _recorded_version(migration)
        if not after:
            connection.execute(_drop_version_table(schema, prefix))
        return VersionChange(before, after)


def run_offline(*, schema: str | None, prefix: str) -> None:
    """Write the SQL of the pending alembic command instead of running it; needs no database.

    The SQL creates ``schema`` if it does not exist; None: the search path in which the SQL is run.
    """
    context.configure(
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},  # otherwise a % in a name would be doubled, as drivers need it
        literal_binds=True,
        version_table=f"{prefix}{VERSION_TABLE}",
        version_table_schema=schema,
        on_version_apply=_write_mark,
    )
    to_nothing = context.get_revision_argument() is None
    with context.begin_transaction():
        context.execute(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
        if schema is not None and not to_nothing:
            context.execute(CreateSchema(schema, if_not_exists=True))
        _run(schema, prefix)
        if to_nothing:
            context.execute(_drop_version_table(schema, prefix))


def _run(schema: str | None, prefix: str) -> None:
    context.run_migrations(op=Operations(context.get_context()), schema=schema, prefix=prefix)


def _write_mark(
    ctx: MigrationContext, step: MigrationInfo, heads: Collection[Any], run_args: Mapping[str, Any]
) -> None:
    """Write the version that a step has led to beside the tables, unless they are gone."""
    if step.is_stamp:
        return
    for after in heads:
        write_version(Operations(ctx), int(after), schema=run_args["schema"], prefix=run_args["prefix"])


def _recorded_version(migration: MigrationContext) -> int:
    """Return the version in the version table, 0 if that is missing or empty; refuse one from before the baseline."""
    recorded = int(migration.get_current_revision() or 0)
    if 0 < recorded < BASELINE:
        raise before_baseline(f"{migration.version_table} says", recorded)
    return recorded


def is_of_host(connection: Connection, *, schema: str | None, prefix: str) -> bool:
    """Whether another alembic history than ours made the tables, or Django."""
    inspector = sa.inspect(connection)
    has_inbox, has_ours = (
        inspector.has_table(f"{prefix}{name}", schema=schema) for name in ("processed_message", VERSION_TABLE)
    )
    return has_inbox and not has_ours


def _require_ours(recorded: int, connection: Connection, schema: str | None, prefix: str) -> None:
    """Raise if the tables' version and our version table disagree: then another alembic history manages the tables."""
    version_table = f"{prefix}{VERSION_TABLE}"
    if not recorded:
        inspector = sa.inspect(connection)
        strangers = [f"{prefix}{name}" for name in TABLE_NAMES if inspector.has_table(f"{prefix}{name}", schema=schema)]
        if strangers:
            raise MigrationError(
                f"found {', '.join(strangers)} but no {version_table}: another alembic history manages "
                "txbox's tables. Upgrade them there, in a new revision that calls "
                f"txbox_migrations.upgrade(op, to={LATEST}, …); or name another schema or prefix"
            )
        return
    if recorded > LATEST:
        raise MigrationError(
            f"{version_table} says version {recorded}, and this release of txbox knows versions up to {LATEST}; "
            "install the release that made it, or a newer one"
        )
    present = current_version(connection, schema=schema, prefix=prefix)
    if recorded != present:
        raise MigrationError(
            f"{version_table} says version {recorded}, but the tables are at version {present}: something else has "
            "moved them. Find out with `txbox db check`, and let one alembic history manage them"
        )


def _drop_version_table(schema: str | None, prefix: str) -> DropTable:
    return DropTable(sa.Table(f"{prefix}{VERSION_TABLE}", sa.MetaData(), schema=schema), if_exists=True)
