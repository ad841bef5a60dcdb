"""Version 4: the outbox."""

from alembic import op

import txbox_migrations

revision = "4"
down_revision = "3"


def upgrade(schema: str | None, prefix: str) -> None:
    """Run step 4."""
    txbox_migrations.upgrade(op, to=4, since=3, schema=schema, prefix=prefix)


def downgrade(schema: str | None, prefix: str) -> None:
    """Undo step 4."""
    txbox_migrations.downgrade(op, to=3, since=4, schema=schema, prefix=prefix)
