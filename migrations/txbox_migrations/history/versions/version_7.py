"""Version 7: operations."""

from alembic import op

import txbox_migrations

revision = "7"
down_revision = "6"


def upgrade(schema: str | None, prefix: str) -> None:
    """Run step 7."""
    txbox_migrations.upgrade(op, to=7, since=6, schema=schema, prefix=prefix)


def downgrade(schema: str | None, prefix: str) -> None:
    """Undo step 7."""
    txbox_migrations.downgrade(op, to=6, since=7, schema=schema, prefix=prefix)
