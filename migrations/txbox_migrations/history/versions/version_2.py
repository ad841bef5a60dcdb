"""Version 2: failures and dead letters."""

from alembic import op

import txbox_migrations

revision = "2"
down_revision = "1"


def upgrade(schema: str | None, prefix: str) -> None:
    """Run step 2."""
    txbox_migrations.upgrade(op, to=2, since=1, schema=schema, prefix=prefix)


def downgrade(schema: str | None, prefix: str) -> None:
    """Undo step 2."""
    txbox_migrations.downgrade(op, to=1, since=2, schema=schema, prefix=prefix)
