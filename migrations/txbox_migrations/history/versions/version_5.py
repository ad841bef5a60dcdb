"""Version 5: leases and watermarks."""

from alembic import op

import txbox_migrations

revision = "5"
down_revision = "4"


def upgrade(schema: str | None, prefix: str) -> None:
    """Run step 5."""
    txbox_migrations.upgrade(op, to=5, since=4, schema=schema, prefix=prefix)


def downgrade(schema: str | None, prefix: str) -> None:
    """Undo step 5."""
    txbox_migrations.downgrade(op, to=4, since=5, schema=schema, prefix=prefix)
