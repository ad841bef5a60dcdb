"""Step 11: how far the lanes of subscribers in this database were begun, and who gets the messages of a topic."""

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy import BigInteger, Column, PrimaryKeyConstraint, Text

revision = "11"
down_revision = "10"


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Create both tables, empty."""
    op.create_table(
        f"{prefix}inbox_lane",
        Column("lane", BigInteger, autoincrement=False, nullable=False),
        Column("begun_to", BigInteger, nullable=False, comment="the highest position that a worker may have begun"),
        PrimaryKeyConstraint("lane", name=op.f(f"{prefix}inbox_lane_pkey")),
        schema=schema,
    )
    op.create_table(
        f"{prefix}subscription",
        Column("topic", Text(collation="C"), nullable=False),
        Column("subscriber_id", Text(collation="C"), nullable=False),
        Column("first_lane", BigInteger, nullable=False, comment="of the subscriber's destination"),
        Column("added_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        PrimaryKeyConstraint("topic", "subscriber_id", name=op.f(f"{prefix}subscription_pkey")),
        schema=schema,
    )


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Drop both tables, and with them who has subscribed."""
    op.drop_table(f"{prefix}subscription", schema=schema)
    op.drop_table(f"{prefix}inbox_lane", schema=schema)
