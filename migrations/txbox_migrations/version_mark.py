"""The mark that says which version the tables are at: a comment on the inbox's primary key.

It is on the constraint and not on the table for two reasons: autogenerate compares table comments with the metadata and
would propose to drop it, and a table's comment is for the database's own documentation. A rotating inbox has no primary
key of its own, so there the mark is on the column ``generation``.
"""

import re
from typing import Any, Final

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.engine import Connection
from sqlalchemy.schema import SetColumnComment, SetConstraintComment

from txbox.schema import prefix_problem
from txbox_migrations.errors import MigrationError
from txbox_migrations.steps import BASELINE, LATEST, LIFTED_BY

_MARK: Final = re.compile(r"txbox schema (\d+)")

# A null schema means the same as for an unqualified name: the first match on the search path.
_READ_MARK: Final = sa.text("""
    SELECT n.nspname AS schema, t.relkind = 'p' AS rotates,
           CASE WHEN t.relkind = 'p' THEN pg_catalog.col_description(t.oid, a.attnum)
                ELSE pg_catalog.obj_description(k.oid, 'pg_constraint') END AS mark
    FROM pg_catalog.pg_class AS t
    JOIN pg_catalog.pg_namespace AS n ON n.oid = t.relnamespace
    LEFT JOIN pg_catalog.pg_constraint AS k ON k.conrelid = t.oid AND k.contype = 'p'
    LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid = t.oid AND a.attname = 'generation'
    WHERE t.relname = :table AND t.relkind IN ('r', 'p')
      AND CASE WHEN CAST(:schema AS text) IS NULL THEN pg_catalog.pg_table_is_visible(t.oid)
               ELSE n.nspname = CAST(:schema AS text) END
""")


def current_version(connection: Connection, *, schema: str | None = None, prefix: str = "") -> int:
    """Return the version of the tables in a database.

    Args:
        connection: any connection to the database; one query runs on it.
        schema: the schema that holds the tables; None: the connection's search path.
        prefix: the prefix of every table name.

    Returns:
        The number of the last step that was run; 0 if there is no inbox.

    Raises:
        MigrationError: the inbox has no mark, or a mark of a release newer than this one or from before the baseline.
    """
    table = f"{prefix}processed_message"
    found = _find(connection, schema, prefix)
    if found is None:
        return 0
    version = _version(found, table)
    if version is None:
        raise MigrationError(
            f"table {found.schema}.{table} exists, but its primary key has no comment 'txbox schema N' to say its "
            "version; if it is ours, pass since=N, the last step it has had"
        )
    if version > LATEST:
        raise MigrationError(
            f"table {found.schema}.{table} is at version {version}, and this release of txbox knows versions up to "
            f"{LATEST}; install the release that made it, or a newer one"
        )
    return version


def refuse_before_baseline(connection: Connection, *, schema: str | None, prefix: str) -> None:
    """Raise ``MigrationError`` if the tables' mark is from before the baseline."""
    if (found := _find(connection, schema, prefix)) is not None:
        _version(found, f"{prefix}processed_message")


def before_baseline(what: str, version: int) -> MigrationError:
    """Return the error for tables that only an earlier commit can bring to the baseline."""
    return MigrationError(
        f"{what} version {version}, and this release of txbox goes on from version {BASELINE}; bring the tables to it "
        f"with txbox of commit {LIFTED_BY} first"
    )


def write_version(op: Operations, version: int, *, schema: str | None, prefix: str) -> None:
    """Mark the inbox as being at a version above 0. In an offline script, the inbox must be a single table."""
    if not op.get_context().as_sql and (found := _find(op.get_bind(), schema, prefix)) is not None and found.rotates:
        column = sa.Column("generation", sa.Integer, comment=f"txbox schema {version}")
        sa.Table(f"{prefix}processed_message", sa.MetaData(), column, schema=schema)
        op.execute(SetColumnComment(column))
        return
    key = sa.PrimaryKeyConstraint(
        "subscriber_id", "message_id", name=op.f(f"{prefix}processed_message_pkey"), comment=f"txbox schema {version}"
    )
    sa.Table(
        f"{prefix}processed_message",
        sa.MetaData(),
        sa.Column("subscriber_id", sa.Text),
        sa.Column("message_id", sa.Text),
        key,
        schema=schema,
    )
    op.execute(SetConstraintComment(key))


def _version(found: sa.Row[Any], table: str) -> int | None:
    """Return the version in a mark, or None if there is none; refuse one from before the baseline."""
    mark = _MARK.fullmatch(found.mark or "")
    if mark is not None and int(mark[1]) < BASELINE:
        raise before_baseline(f"table {found.schema}.{table} is at", int(mark[1]))
    return int(mark[1]) if mark else None


def _find(connection: Connection, schema: str | None, prefix: str) -> sa.Row[Any] | None:
    where = {"table": f"{prefix}processed_message", "schema": schema}
    return connection.execute(_READ_MARK, where).one_or_none()


def require_prefix(prefix: str) -> None:
    """Raise ``MigrationError`` if the prefix is so long that names would be cut off."""
    if problem := prefix_problem(prefix):
        raise MigrationError(f"{problem}. Choose a shorter one, or a schema of its own")


def require_version(argument: str, version: int, *, lowest: int = 0) -> None:
    """Raise ``MigrationError`` if an argument is no version of the tables."""
    if 0 < version < BASELINE:
        raise MigrationError(
            f"{argument}={version}: versions 1 to {BASELINE - 1} are of before the baseline, and only txbox of commit "
            f"{LIFTED_BY} knows them; where a revision of yours names one, write {BASELINE}"
        )
    if not lowest <= version <= LATEST:
        known = f"{BASELINE} to {LATEST}" if lowest else f"0 (no tables) and {BASELINE} to {LATEST}"
        raise MigrationError(f"{argument}={version}: this release of txbox knows versions {known}")
