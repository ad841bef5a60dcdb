"""Version 1: the inbox."""

from alembic import op

import txbox_migrations

revision = "1"
down_revision = None


def upgrade(schema: str | None, prefix: str) -> None:
    """Run step 1."""
    txbox_migrations.upgrade(op, to=1, since=0, schema=schema, prefix=prefix)


def downgrade(schema: str | None, prefix: str) -> None:
    """Undo step 1."""
    txbox_migrations.downgrade(op, to=0, since=1, schema=schema, prefix=prefix)
