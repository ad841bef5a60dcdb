"""Step 10: responses to HTTP requests, kept beside the effects of the requests, for repeats."""

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects.postgresql import JSONB

BYTEWISE = sa.Text(collation="C")
MOMENT = sa.DateTime(timezone=True)


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Add the table kept_response."""
    op.create_table(
        f"{prefix}kept_response",
        sa.Column("subscriber_id", BYTEWISE, nullable=False),
        sa.Column("message_id", BYTEWISE, nullable=False),
        sa.Column(
            "kept_at",
            MOMENT,
            server_default=sa.func.now(),
            nullable=False,
            comment="its row in the inbox has the same time",
        ),
        sa.Column("fingerprint", sa.LargeBinary, nullable=False, comment="SHA-256 of the request"),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("headers", JSONB, nullable=False, comment="names and values, in order"),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("subscriber_id", "message_id", name=op.f(f"{prefix}kept_response_pkey")),
        schema=schema,
    )


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Take it back: repeats of requests get no responses any more."""
    op.drop_table(f"{prefix}kept_response", schema=schema)
