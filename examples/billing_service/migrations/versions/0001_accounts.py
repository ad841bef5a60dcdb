"""The accounts, and txbox's tables beside them."""

import sqlalchemy as sa
from alembic import op

import txbox_migrations

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create them."""
    op.create_table(
        "account",
        sa.Column("account_id", sa.Text, primary_key=True),
        sa.Column("purchases", sa.Integer, nullable=False),
        sa.Column("cents", sa.BigInteger, nullable=False),
    )
    txbox_migrations.upgrade(op, to=11)


def downgrade() -> None:
    """Drop them."""
    txbox_migrations.downgrade(op, to=0)
    op.drop_table("account")
