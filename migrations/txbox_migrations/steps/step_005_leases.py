"""Step 5: message_lease holds the leases of messages, aggregate_watermark what was seen of each aggregate."""

import sqlalchemy as sa
from alembic.operations import Operations


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Create message_lease and aggregate_watermark."""
    op.create_table(
        f"{prefix}message_lease",
        sa.Column("subscriber_id", sa.Text(collation="C"), nullable=False),
        sa.Column("message_id", sa.Text(collation="C"), nullable=False),
        sa.Column(
            "fence", sa.BigInteger, sa.Identity(always=True), nullable=False, comment="grows with every acquisition"
        ),
        sa.Column("attempts", sa.Integer, nullable=False, comment="acquisitions"),
        sa.Column(
            "failures",
            sa.Integer,
            server_default=sa.text("0"),
            nullable=False,
            comment="attempts that were released: known to have failed",
        ),
        sa.Column(
            "unknown_before",
            sa.Integer,
            server_default=sa.text("0"),
            nullable=False,
            comment="attempts that are out of the count, and whose end nobody knows",
        ),
        sa.Column("owner", sa.Text, nullable=False, comment="of the last attempt: its host and process; for people"),
        sa.Column("fingerprint", sa.LargeBinary, comment="SHA-256 of the payload; null where none was asked for"),
        sa.Column("acquired_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), comment="of the lease; null: nobody has it"),
        sa.Column("completed_at", sa.DateTime(timezone=True)),
        sa.Column("result", sa.LargeBinary, comment="what the handler returned, as it was encoded"),
        sa.PrimaryKeyConstraint("subscriber_id", "message_id", name=op.f(f"{prefix}message_lease_pkey")),
        sa.CheckConstraint(
            "failures >= 0 AND failures <= attempts",
            name=op.f(f"{prefix}message_lease_attempts_check"),
        ),
        sa.CheckConstraint(
            "expires_at IS NULL OR completed_at IS NULL", name=op.f(f"{prefix}message_lease_state_check")
        ),
        schema=schema,
    )
    op.create_table(
        f"{prefix}aggregate_watermark",
        sa.Column("subscriber_id", sa.Text(collation="C"), nullable=False),
        sa.Column("aggregate_type", sa.Text(collation="C"), nullable=False),
        sa.Column("aggregate_id", sa.Text(collation="C"), nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("sequence_before", sa.BigInteger, comment="before the last advance; null: there was none"),
        sa.Column("advanced_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.PrimaryKeyConstraint(
            "subscriber_id", "aggregate_type", "aggregate_id", name=op.f(f"{prefix}aggregate_watermark_pkey")
        ),
        schema=schema,
    )


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Drop both tables: what they knew to be done would be done again."""
    for name in ("aggregate_watermark", "message_lease"):
        op.drop_table(f"{prefix}{name}", schema=schema)
