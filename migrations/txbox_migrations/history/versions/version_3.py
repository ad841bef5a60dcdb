"""Version 3: the ledger of bulk loads."""

from alembic import op

import txbox_migrations

revision = "3"
down_revision = "2"


def upgrade(schema: str | None, prefix: str) -> None:
    """Run step 3."""
    txbox_migrations.upgrade(op, to=3, since=2, schema=schema, prefix=prefix)


def downgrade(schema: str | None, prefix: str) -> None:
    """Undo step 3."""
    txbox_migrations.downgrade(op, to=2, since=3, schema=schema, prefix=prefix)
