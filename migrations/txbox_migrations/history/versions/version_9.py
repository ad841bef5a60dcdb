"""Version 9: archives."""

from alembic import op

import txbox_migrations

revision = "9"
down_revision = "8"


def upgrade(schema: str | None, prefix: str) -> None:
    """Run step 9."""
    txbox_migrations.upgrade(op, to=9, since=8, schema=schema, prefix=prefix)


def downgrade(schema: str | None, prefix: str) -> None:
    """Undo step 9."""
    txbox_migrations.downgrade(op, to=8, since=9, schema=schema, prefix=prefix)
