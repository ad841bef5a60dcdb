"""Step 8: what pages show of the last days: what workers and relays did in each minute, and what people did."""

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects.postgresql import JSONB

BYTEWISE = sa.Text(collation="C")
MOMENT = sa.DateTime(timezone=True)


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Add the tables reported_activity and operator_action, and a column of worker_report."""
    op.create_table(
        f"{prefix}reported_activity",
        sa.Column("kind", BYTEWISE, nullable=False),
        sa.Column("name", BYTEWISE, nullable=False, comment="of the subscriber or destination; of an outbox, empty"),
        sa.Column("minute", MOMENT, nullable=False),
        sa.Column("figure", BYTEWISE, nullable=False, comment="what is counted, such as an outcome"),
        sa.Column("count", sa.BigInteger, server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("kind", "name", "minute", "figure", name=op.f(f"{prefix}reported_activity_pkey")),
        sa.CheckConstraint(
            "kind IN ('subscriber', 'destination', 'outbox')", name=op.f(f"{prefix}reported_activity_kind_check")
        ),
        schema=schema,
    )
    op.create_table(
        f"{prefix}operator_action",
        sa.Column("action_id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("acted_at", MOMENT, server_default=sa.func.now(), nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("detail", JSONB, server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.PrimaryKeyConstraint("action_id", name=op.f(f"{prefix}operator_action_pkey")),
        schema=schema,
    )
    oldest = sa.Column("oldest_sent_at", MOMENT, comment="when the oldest message of its last batch was sent")
    op.add_column(f"{prefix}worker_report", oldest, schema=schema)


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Take them back; what they have recorded goes."""
    op.drop_column(f"{prefix}worker_report", "oldest_sent_at", schema=schema)
    op.drop_table(f"{prefix}operator_action", schema=schema)
    op.drop_table(f"{prefix}reported_activity", schema=schema)
