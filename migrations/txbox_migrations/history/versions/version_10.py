"""Version 10: the baseline."""

from alembic import op

import txbox_migrations

revision = "10"
down_revision = None


def upgrade(schema: str | None, prefix: str) -> None:
    txbox_migrations.upgrade(op, to=10, since=0, schema=schema, prefix=prefix)


def downgrade(schema: str | None, prefix: str) -> None:
    txbox_migrations.downgrade(op, to=0, since=10, schema=schema, prefix=prefix)
