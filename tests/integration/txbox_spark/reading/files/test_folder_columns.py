"""Folders named key=value: files that lie beside them, and columns that the files have, too."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from support.spark.event_files import Write
from txbox_spark.reading.errors import SourceError
from txbox_spark.reading.sources import read_events

EVERY_FILE = {"recursiveFileLookup": "true"}
EVENTS = {"json": '{"event_id": "%s"}\n', "csv": "event_id\n%s\n"}


def ids(spark: SparkSession, path: Path, **given: dict[str, str]) -> list[str]:
    return sorted(row.event_id for row in read_events(spark, [str(path)], **given).collect())


class TestFilesBesideFolders:
    @pytest.fixture(params=EVENTS)
    def archive(self, request: pytest.FixtureRequest, tmp_path: Path, write: Write) -> Path:
        names = "top of all", "store=007/first", "store=a%2Fb c/second", "store=007/below/third"
        for name in names:
            write(f"day=1/{name}.{request.param}", EVENTS[request.param] % name.rpartition("/")[2])
        return tmp_path / "day=1"

    def test_are_refused_by_name(self, spark: SparkSession, archive: Path) -> None:
        with pytest.raises(SourceError, match=r"1 of 4 files would be passed over, such as \S*top%20of%20all") as it:
            read_events(spark, [str(archive)])
        assert "they lie beside folders that are named key=value; read them apart, or give the option" in str(it.value)

    def test_are_read_with_every_file_or_apart(self, spark: SparkSession, archive: Path) -> None:
        assert ids(spark, archive, options=EVERY_FILE) == ["first", "second", "third", "top of all"]
        for file in archive.glob("top*"):
            assert ids(spark, file) == ["top of all"]
            file.unlink()
        assert ids(spark, archive) == ["first", "second", "third"]
        stores = {row.store for row in read_events(spark, [str(archive)]).collect()}
        assert stores == {"007", "a/b c"}


def test_a_parquet_file_beside_folders_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    spark.sql("SELECT 'a' AS event_id").write.parquet(str(tmp_path / "store=007"))
    spark.sql("SELECT 'b' AS event_id").coalesce(1).write.mode("append").parquet(str(tmp_path))
    with pytest.raises(SourceError, match="1 of 2 files would be passed over"):
        read_events(spark, [str(tmp_path)])


class TestColumnsOfFilesAndFolders:
    """Spark takes what the folder says, and never reads what the file does."""

    @pytest.fixture(params=["json", "a document", "latin1", "csv", "latin1.csv", "parquet"])
    def given(
        self, request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path, write: Write
    ) -> dict[str, str]:
        kind = request.param
        if kind == "parquet":
            spark.sql("SELECT 'a' AS event_id, 9 AS Store").write.parquet(str(tmp_path / "store=007"))
        elif kind.endswith("csv"):
            write("store=007/a.csv", "event_id,Store\né,9\n".encode("latin1" if kind == "latin1.csv" else "utf-8"))
        else:
            write("store=006/a.json", '{"event_id": "a"}\n')
            record = '{"event_id": "é", "Store": null}\n'
            write(
                "store=007/a.json",
                f"[{record}]" if kind == "a document" else record.encode(kind.replace("json", "utf-8")),
            )
        return {"multiLine": "true"} if kind == "a document" else {"encoding": "latin1"} if "latin1" in kind else {}

    def test_are_refused(self, spark: SparkSession, tmp_path: Path, given: dict[str, str]) -> None:
        said = "the column store is in the files of .* and in the names of their folders, .* recursiveFileLookup=true"
        for schema in (None, "event_id string, store int"):
            with pytest.raises(SourceError, match=said):
                read_events(spark, [str(tmp_path)], options=given, schema=schema)

    def test_are_read_as_the_files_say_on_request(
        self, spark: SparkSession, tmp_path: Path, given: dict[str, str]
    ) -> None:
        frame = read_events(spark, [str(tmp_path)], options={**given, **EVERY_FILE})
        assert {row.Store for row in frame.collect()} <= {None, 9, "9"}


def test_a_folder_named_as_spark_names_lines_is_refused(spark: SparkSession, write: Write) -> None:
    path = Path(write("archive/value=7/a.json", b'{"event_id": "\xff"}\n')).parents[1]
    with pytest.raises(SourceError, match="are named value=…, as Spark names the lines of a file; rename them"):
        read_events(spark, [str(path)])
