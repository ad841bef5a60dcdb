"""Version 8: activity."""

from alembic import op

import txbox_migrations

revision = "8"
down_revision = "7"


def upgrade(schema: str | None, prefix: str) -> None:
    """Run step 8."""
    txbox_migrations.upgrade(op, to=8, since=7, schema=schema, prefix=prefix)


def downgrade(schema: str | None, prefix: str) -> None:
    """Undo step 8."""
    txbox_migrations.downgrade(op, to=7, since=8, schema=schema, prefix=prefix)
