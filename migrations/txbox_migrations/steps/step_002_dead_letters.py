"""Step 2: message_failure counts failed attempts, dead_letter keeps messages parked after the last one."""

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects.postgresql import JSONB


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Create message_failure and dead_letter."""
    op.create_table(
        f"{prefix}message_failure",
        sa.Column("subscriber_id", sa.Text(collation="C"), nullable=False),
        sa.Column("message_id", sa.Text(collation="C"), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("first_failed_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column("last_failed_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.PrimaryKeyConstraint("subscriber_id", "message_id", name=op.f(f"{prefix}message_failure_pkey")),
        sa.CheckConstraint("attempts > 0", name=op.f(f"{prefix}message_failure_attempts_check")),
        schema=schema,
    )
    op.create_table(
        f"{prefix}dead_letter",
        sa.Column("dead_letter_id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("subscriber_id", sa.Text(collation="C"), nullable=False),
        sa.Column("message_id", sa.Text(collation="C"), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False, comment="as the broker delivered it"),
        sa.Column("body_hash", sa.LargeBinary, nullable=False, comment="SHA-256 of body"),
        sa.Column("headers", JSONB, nullable=False),
        sa.Column("envelope", JSONB, nullable=False, comment="what the broker needs to send it again"),
        sa.Column("parked_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column("redriven_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("dead_letter_id", name=op.f(f"{prefix}dead_letter_pkey")),
        sa.CheckConstraint(
            "reason IN ('failed', 'mismatch', 'malformed', 'crashed')",
            name=op.f(f"{prefix}dead_letter_reason_check"),
        ),
        schema=schema,
    )
    op.create_index(
        op.f(f"{prefix}dead_letter_parked_once"),
        f"{prefix}dead_letter",
        ["subscriber_id", "message_id", "body_hash"],
        unique=True,
        schema=schema,
        postgresql_where=sa.text("redriven_at IS NULL"),
    )


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Drop dead_letter and message_failure, with every parked message."""
    op.drop_table(f"{prefix}dead_letter", schema=schema)
    op.drop_table(f"{prefix}message_failure", schema=schema)
