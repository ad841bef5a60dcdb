"""Step 3: bulk_load and bulk_load_chunk, the ledger of bulk loads: which there are, and which chunks are done."""

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects.postgresql import JSONB


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Create bulk_load and bulk_load_chunk."""
    op.create_table(
        f"{prefix}bulk_load",
        sa.Column("run_id", sa.Text(collation="C"), nullable=False),
        sa.Column("subscriber_id", sa.Text(collation="C"), nullable=False),
        sa.Column("source", sa.Text, nullable=False, comment="what is loaded, in words"),
        sa.Column("digest", sa.LargeBinary, nullable=False, comment="SHA-256 of what a resumed run must find again"),
        sa.Column("writer", sa.Text, nullable=False),
        sa.Column("chunks", sa.Integer, nullable=False),
        sa.Column("bounds", JSONB, nullable=False, comment="the first message id of each chunk but the first"),
        sa.Column(
            "attempts",
            sa.Integer,
            server_default=sa.text("1"),
            nullable=False,
            comment="how often it was begun; names the staging table",
        ),
        sa.Column("staging_table", sa.Text, comment="the complete staging table, of writer jdbc"),
        sa.Column("rows_read", sa.BigInteger),
        sa.Column("rows_rejected", sa.BigInteger),
        sa.Column("rejected_sample", JSONB),
        sa.Column("error", sa.Text, comment="why the last attempt ended"),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("run_id", name=op.f(f"{prefix}bulk_load_pkey")),
        sa.CheckConstraint("writer IN ('copy', 'jdbc')", name=op.f(f"{prefix}bulk_load_writer_check")),
        sa.CheckConstraint("chunks > 0", name=op.f(f"{prefix}bulk_load_chunks_check")),
        schema=schema,
    )
    op.create_table(
        f"{prefix}bulk_load_chunk",
        sa.Column("run_id", sa.Text(collation="C"), nullable=False),
        sa.Column("chunk", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("rows_read", sa.BigInteger, server_default=sa.text("0"), nullable=False),
        sa.Column("rows_rejected", sa.BigInteger, server_default=sa.text("0"), nullable=False),
        sa.Column("already_processed", sa.BigInteger, server_default=sa.text("0"), nullable=False),
        sa.Column("applied", sa.BigInteger, server_default=sa.text("0"), nullable=False),
        sa.Column("rejected_sample", JSONB),
        sa.Column("merged_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "chunk", name=op.f(f"{prefix}bulk_load_chunk_pkey")),
        schema=schema,
    )


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Drop bulk_load_chunk and bulk_load, and with them the staging tables of loads that have not been finished.

    Staging tables do not outlive their ledger: without it nothing tells which of them is complete, no load can be
    resumed from them, and the version below neither cleans them up nor hides them from a host's autogenerate.
    """
    op.execute(sa.text(_drop_staging_tables(schema, prefix).replace(":", "\\:")))
    op.drop_table(f"{prefix}bulk_load_chunk", schema=schema)
    op.drop_table(f"{prefix}bulk_load", schema=schema)


def _drop_staging_tables(schema: str | None, prefix: str) -> str:
    """Write a statement that drops every staging table beside the ledger; Postgres lists them, offline runs included.

    Partitions go with their table. There is no percent sign in it: some offline dialects would double it.
    """
    ledger = ".".join(_identifier(name) for name in (schema, f"{prefix}bulk_load") if name)
    start = f"{prefix}bulk_load_staging_"
    block = f"""
DECLARE
    staging regclass;
BEGIN
    FOR staging IN
        SELECT s.oid
        FROM pg_catalog.pg_class AS s
        JOIN pg_catalog.pg_class AS l ON l.relnamespace = s.relnamespace
        WHERE l.oid = pg_catalog.to_regclass({_literal(ledger)})
          AND s.relkind IN ('r', 'p') AND NOT s.relispartition
          AND pg_catalog.starts_with(s.relname, {_literal(start)})
          AND pg_catalog.substr(s.relname, {len(start) + 1}) ~ '^[0-9a-f]{{12}}_[0-9]+(_[0-9]+)?$'
    LOOP
        EXECUTE 'DROP TABLE ' || staging;
    END LOOP;
END
"""  # noqa: S608 # every name in it is quoted below
    return f"DO {_literal(block)}"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
