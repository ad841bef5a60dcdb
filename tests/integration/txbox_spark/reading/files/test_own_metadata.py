"""Files with a column ``_metadata``, which is what Spark names its own column that says which file a row is from."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from pyspark.sql import SparkSession

from txbox_spark.reading.event_rows import prepare
from txbox_spark.reading.sources import read_events

CSV = "id,_metadata\na,x\n,y\nb,é\n"
JSON = '{"id": "a", "_metadata": "x"}\n{"_metadata": "y"}\n{"id": "b", "_metadata": "é"}\n'
NESTED = '{"id": "a", "_metadata": {"file_path": "/x"}}\n{"_metadata": {"file_path": "/y"}}\n'
DOCUMENT = '[{"id": "a", "_metadata": "x"}, {"_metadata": "y"}, {"id": "b", "_metadata": "é"}]'

FILES: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "csv": ("events.csv", CSV.encode(), {}),
    "csv, partly latin1": ("events.csv", CSV.encode("latin1"), {}),
    "csv in latin1": ("events.csv", CSV.encode("latin1"), {"encoding": "latin1"}),
    "csv in UTF-16": ("events.csv", CSV.encode("utf-16"), {"encoding": "utf-16"}),
    "json": ("events.jsonl", JSON.encode(), {}),
    "json, partly latin1": ("events.jsonl", JSON.encode("latin1"), {}),
    "json in latin1": ("events.jsonl", JSON.encode("latin1"), {"encoding": "latin1"}),
    "json, nested": ("events.jsonl", NESTED.encode(), {}),
    "json document": ("events.json", DOCUMENT.encode(), {"multiLine": "true"}),
    "json document in latin1": ("events.json", DOCUMENT.encode("latin1"), {"multiLine": "true", "encoding": "latin1"}),
}


def loaded(spark: SparkSession, path: str, options: dict[str, str]) -> dict[str | None, tuple[object, str | None]]:
    """Each row's ``_metadata`` as it is sent, by its id, and the file that a rejected one is said to be from."""
    prepared = prepare(read_events(spark, [path], options=options), "id")
    (column,) = [one for one in prepared.columns if one.name == "_metadata"]
    rows = prepared.staged.select("message_id", column.staged_as, "rejected").collect()
    return {row[0]: (row[1], None if row[2] is None else json.loads(row[2]).get("file")) for row in rows}


@pytest.mark.parametrize("kind", FILES)
def test_it_is_loaded_as_any_other(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    name, content, options = FILES[kind]
    path = tmp_path / name
    path.write_bytes(content)
    found = loaded(spark, str(path), options)
    assert found["a"] == ('{"file_path":"/x"}' if "nested" in kind else "x", None)
    assert found[None][1] == f"file:{path}"
    if "partly" not in kind and "nested" not in kind:
        assert found["b"] == ("é", None)


def test_of_parquet_too(spark: SparkSession, tmp_path: Path) -> None:
    table = pyarrow.table({"id": ["a", None], "_metadata": ["x", "y"]})
    parquet.write_table(table, tmp_path / "events.parquet")
    path = str(tmp_path / "events.parquet")
    assert loaded(spark, path, {}) == {"a": ("x", None), None: ("y", f"file:{path}")}


@pytest.mark.parametrize(
    ("name", "content"), [("events.csv", 'id\n"a"\n""\n'), ("events.jsonl", '{"id": "a"}\n{"id": ""}')]
)
def test_of_a_folder_s_name_too(spark: SparkSession, tmp_path: Path, name: str, content: str) -> None:
    folder = tmp_path / "_metadata=7"
    folder.mkdir()
    (folder / name).write_text(content)
    found = loaded(spark, str(tmp_path), {})
    assert found == {"a": ("7", None), None: ("7", f"file:{folder}/{name}")}


@pytest.mark.parametrize("encoding", ["utf-8", "latin1"])
def test_of_files_with_their_columns_in_another_order(spark: SparkSession, tmp_path: Path, encoding: str) -> None:
    (tmp_path / "1.csv").write_bytes("id,_metadata\na,é\n,y\n".encode(encoding))
    (tmp_path / "2.csv").write_bytes("_metadata,id\nz,b\n".encode(encoding))
    found = loaded(spark, str(tmp_path), {"encoding": encoding})
    assert {key: value for key, (value, _) in found.items()} == {"a": "é", "b": "z", None: "y"}
