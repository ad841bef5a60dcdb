"""Step 9: archives: how far the folders are that hold what was sent and processed."""

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects.postgresql import JSONB

BYTEWISE = sa.Text(collation="C")
MOMENT = sa.DateTime(timezone=True)


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Add the table archive."""
    upto = "what was sent or processed before it is there; null: nothing is"
    op.create_table(
        f"{prefix}archive",
        sa.Column("location", BYTEWISE, nullable=False),
        sa.Column(
            "archive_id", sa.Text, nullable=False, comment="is in the folder, too: another one is not taken for it"
        ),
        sa.Column("archived_upto", MOMENT, comment=upto),
        sa.Column("pending", JSONB, comment="days that are written, and are being put in place"),
        sa.Column("begun_at", MOMENT, server_default=sa.func.now(), nullable=False),
        sa.Column("archived_at", MOMENT, comment="when it got on last"),
        sa.PrimaryKeyConstraint("location", name=op.f(f"{prefix}archive_pkey")),
        schema=schema,
    )


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Take it back; the folders stay."""
    op.drop_table(f"{prefix}archive", schema=schema)
