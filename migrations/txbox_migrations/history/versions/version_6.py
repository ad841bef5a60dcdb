"""Version 6: safeguards."""

from alembic import op

import txbox_migrations

revision = "6"
down_revision = "5"


def upgrade(schema: str | None, prefix: str) -> None:
    """Run step 6."""
    txbox_migrations.upgrade(op, to=6, since=5, schema=schema, prefix=prefix)


def downgrade(schema: str | None, prefix: str) -> None:
    """Undo step 6."""
    txbox_migrations.downgrade(op, to=5, since=6, schema=schema, prefix=prefix)
