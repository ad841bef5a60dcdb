"""The tables as metadata. That the database agrees is tested with the migrations."""

import pytest
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from txbox.schema import TABLE_NAMES, is_staging, tables


def test_the_inbox_is_the_contract_that_other_peoples_sql_relies_on() -> None:
    inbox = tables().processed_message
    assert inbox.name == "processed_message"
    assert [(column.name, str(column.type), column.nullable) for column in inbox.columns] == [
        ("subscriber_id", 'TEXT COLLATE "C"', False),
        ("message_id", 'TEXT COLLATE "C"', False),
        ("processed_at", "DATETIME", False),
        ("fingerprint", "BLOB", True),
        ("dead_letter_id", "BIGINT", True),
    ]
    assert [column.name for column in inbox.primary_key] == ["subscriber_id", "message_id"]
    created = str(CreateTable(inbox).compile(dialect=postgresql.dialect()))
    assert "processed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL" in created
    assert "fingerprint BYTEA" in created


@pytest.mark.parametrize(("schema", "prefix"), [(None, ""), ("billing", ""), (None, "txbox_"), ("Odd schema-%", "P_")])
def test_schema_and_prefix_reach_every_table_index_and_constraint(schema: str | None, prefix: str) -> None:
    metadata = tables(schema, prefix).metadata
    assert {table.name for table in metadata.tables.values()} == {f"{prefix}{name}" for name in TABLE_NAMES}
    for table in metadata.tables.values():
        assert table.schema == schema
        for named in (*table.indexes, *table.constraints):
            assert named.name is None or str(named.name).startswith(prefix)


@pytest.mark.parametrize("prefix", ["", "txbox_", "Odd%_", "a.b|"])
def test_staging_tables_are_known_by_their_names(prefix: str) -> None:
    assert is_staging(f"{prefix}bulk_load_staging_0123456789ab_1", prefix)
    assert is_staging(f"{prefix}bulk_load_staging_ffffffffffff_12_107", prefix)


@pytest.mark.parametrize(
    "name",
    [
        *TABLE_NAMES,
        "bulk_load_staging",
        "bulk_load_staging_area",
        "bulk_load_staging_0123456789ab",
        "bulk_load_staging_0123456789ab_",
        "bulk_load_staging_0123456789AB_1",
        "bulk_load_staging_0123456789abc_1",
        "bulk_load_staging_0123456789ab_1_2_3",
        "bulk_load_staging_0123456789ab_1\n",
        "bulk_load_staging_0123456789ab_\u0661",
        "x_bulk_load_staging_0123456789ab_1",
    ],
)
def test_other_names_are_no_staging_tables(name: str) -> None:
    assert not is_staging(name)


def test_staging_tables_of_another_prefix_are_not_ours() -> None:
    assert not is_staging("bulk_load_staging_0123456789ab_1", "txbox_")
    assert not is_staging("aXbulk_load_staging_0123456789ab_1", "a.")
