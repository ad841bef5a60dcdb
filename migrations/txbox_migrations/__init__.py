"""Create and change txbox's tables, from a revision of your own alembic history or by ours.

- ``upgrade(op, to=N)`` and ``downgrade(op, to=N)``: inside a revision of the host's own history;
- ``upgrade_database(url)`` and ``downgrade_database(url)``: by our history, with its own version table;
- ``include_object()``: keeps the host's autogenerate away from our tables;
- ``find_drift(connection)``: compares a live database with the metadata.
"""

from txbox_migrations.autogenerate import include_object
from txbox_migrations.database import downgrade_database, migration_sql, upgrade_database
from txbox_migrations.drift import Difference, Severity, find_drift
from txbox_migrations.environment import VERSION_TABLE, VersionChange
from txbox_migrations.errors import MigrationError
from txbox_migrations.runner import downgrade, upgrade
from txbox_migrations.steps import LATEST
from txbox_migrations.version_mark import current_version

__all__ = [
    "LATEST",
    "VERSION_TABLE",
    "Difference",
    "MigrationError",
    "Severity",
    "VersionChange",
    "current_version",
    "downgrade",
    "downgrade_database",
    "find_drift",
    "include_object",
    "migration_sql",
    "upgrade",
    "upgrade_database",
]
