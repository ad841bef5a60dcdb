"""Step 1: processed_message, the inbox."""

import sqlalchemy as sa
from alembic.operations import Operations


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Create the inbox."""
    op.create_table(
        f"{prefix}processed_message",
        sa.Column("subscriber_id", sa.Text(collation="C"), nullable=False),
        sa.Column("message_id", sa.Text(collation="C"), nullable=False),
        sa.Column("processed_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary, comment="SHA-256 of the body; null where none was asked for"),
        sa.PrimaryKeyConstraint("subscriber_id", "message_id", name=op.f(f"{prefix}processed_message_pkey")),
        schema=schema,
    )


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Drop the inbox, and with it the memory of what has been processed."""
    op.drop_table(f"{prefix}processed_message", schema=schema)
