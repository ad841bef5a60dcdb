"""Files of Parquet and JSON, and sources of several files, read by a real Spark."""

import gzip
import json
import os
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession

from support.spark.event_files import Read, Write, rows
from txbox_spark.reading.errors import SourceError
from txbox_spark.reading.files.readers import CORRUPT_RECORD
from txbox_spark.reading.sources import read_events, source_of

SCHEMA = "event_id string, amount decimal(12,2), units int"
INFERENCE = "spark.sql.sources.partitionColumnTypeInference.enabled"


def test_parquet_comes_back_as_it_was_written(spark: SparkSession, tmp_path: Path) -> None:
    written = [Row(event_id="007", amount=Decimal("12.10"), tags=["a", ""]), Row(event_id=None, amount=None, tags=None)]
    path = str(tmp_path / "archive")
    spark.createDataFrame(written, "event_id string, amount decimal(12,2), tags array<string>").write.parquet(path)
    frame = read_events(spark, [path])
    assert frame.columns == ["event_id", "amount", "tags"]
    assert sorted(rows(frame), key=str) == sorted((tuple(row) for row in written), key=str)


class TestParquetOfSeveralSchemas:
    @pytest.fixture
    def archive(self, spark: SparkSession, tmp_path: Path) -> str:
        for day, units, note in ((1, "1", ""), (2, "2", ", 'n' AS note")):
            spark.sql(f"SELECT 'e{day}' AS event_id, {units} AS units{note}").write.parquet(f"{tmp_path}/a/day={day}")
        return str(tmp_path / "a")

    def test_has_the_columns_of_every_file_or_on_request_of_one(self, spark: SparkSession, archive: str) -> None:
        frame = read_events(spark, [archive])
        assert sorted(frame.columns) == ["day", "event_id", "note", "units"]
        found = sorted(rows(frame.select("event_id", "units", "note", "day")))
        assert found == [("e1", 1, None, "1"), ("e2", 2, "n", "2")]
        assert len(read_events(spark, [archive], options={"mergeschema": "false"}).columns) < 4

    def test_conflicting_types_are_refused_with_both(self, spark: SparkSession, archive: str) -> None:
        spark.sql("SELECT 'e3' AS event_id, 'many' AS units").write.parquet(f"{archive}/day=3")
        with pytest.raises(
            SourceError, match=r"Failed merging schemas: .*units: INT.*units: STRING.* Give a schema"
        ) as it:
            read_events(spark, [archive])
        assert "\n" not in str(it.value)
        found = read_events(spark, [archive], schema="event_id string, note string")
        assert sorted(rows(found.select("event_id", "note")), key=str) == [("e1", None), ("e2", "n"), ("e3", None)]


class TestJson:
    MALFORMED = (
        '{"event_id":"c","amount":"much"}',
        '{"event_id":"d","units":99999999999}',
        "{broken",
        "null",
        '"text"',
    )

    @pytest.fixture
    def path(self, write: Write) -> str:
        good = ['{"event_id":"007","amount":12.10,"units":1}', '{"event_id":"b"}', ""]
        return write("events.jsonl", "\n".join([*good, *self.MALFORMED]) + "\n")

    def test_malformed_lines_stay_with_their_text_whatever_is_asked_for(self, spark: SparkSession, path: str) -> None:
        frame = read_events(spark, [path], schema=SCHEMA)
        assert frame.columns == ["event_id", "amount", "units", CORRUPT_RECORD]
        found = rows(frame)
        assert found[:2] == [("007", Decimal("12.10"), 1, None), ("b", None, None, None)]
        assert tuple(row[-1] for row in found[2:]) == self.MALFORMED
        malformed = frame.where(f"{CORRUPT_RECORD} IS NOT NULL")
        assert malformed.count() == len(self.MALFORMED)
        assert tuple(row[0] for row in malformed.select(CORRUPT_RECORD).collect()) == self.MALFORMED
        assert frame.where(f"{CORRUPT_RECORD} IS NULL").select("event_id").collect() == [("007",), ("b",)]

    def test_columns_are_found_with_exact_numbers_and_texts(self, read: Read) -> None:
        frame = read(
            "events.json",
            '{"event_id":"007","amount":12.10,"units":1,"lines":[{"price":0.1}]}\n'
            '{"event_id":"008","amount":1234.5,"units":2,"lines":[{"price":0.255}]}\n',
        )
        types = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
        assert types["event_id"] == "string"
        assert types["units"] == "bigint"
        assert "double" not in str(types)
        assert frame.select("event_id", "amount", "units", "lines", CORRUPT_RECORD).collect() == [
            ("007", Decimal("12.1"), 1, [Row(price=Decimal("0.1"))], None),
            ("008", Decimal("1234.5"), 2, [Row(price=Decimal("0.255"))], None),
        ]

    def test_compressed_and_several(self, spark: SparkSession, tmp_path: Path, write: Write) -> None:
        (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"event_id":"b"}\n'))
        paths = [write("a.jsonl", '{"event_id":"a"}\n'), str(tmp_path / "b.jsonl.gz")]
        assert sorted(row[0] for row in read_events(spark, paths, schema=SCHEMA).collect()) == ["a", "b"]

    @pytest.mark.parametrize("text", ["", "{broken\n"])
    def test_without_a_good_line_there_are_no_columns(self, spark: SparkSession, write: Write, text: str) -> None:
        path = write("events.json", text)
        with pytest.raises(SourceError, match="no line can be read, so there are no columns"):
            read_events(spark, [path])
        assert len(rows(read_events(spark, [path], schema=SCHEMA))) == text.count("\n")


class TestWhatCannotBeRead:
    @pytest.mark.parametrize(
        ("paths", "why"),
        [
            (["/no/such/file.csv"], r"cannot find /no/such/file\.csv: .*does not exist"),
            (["nothing://host/file.csv", "b.csv"], "cannot find nothing://host/file.csv and 1 more: .*nothing"),
            ([], "give at least one path"),
            ("events.csv", "give at least one path to read events from, in a list"),
        ],
    )
    def test_paths(self, spark: SparkSession, paths: list[str], why: str) -> None:
        with pytest.raises(SourceError, match=why) as refusal:
            read_events(spark, paths)
        assert "\n" not in str(refusal.value)

    def test_a_folder_without_files(self, spark: SparkSession, tmp_path: Path) -> None:
        (tmp_path / "_SUCCESS").touch()
        for read in (read_events, source_of):
            with pytest.raises(SourceError, match="there are no files in"):
                read(spark, [str(tmp_path)])  # type: ignore[operator]

    @pytest.mark.parametrize("schema", ["event_id strin", "event_id string,,", "int", ""])
    def test_a_schema_that_is_none(self, read: Read, schema: str) -> None:
        with pytest.raises(SourceError, match=r"schema .* (is not Spark DDL|names no columns)") as refusal:
            read("events.csv", "event_id\n1\n", schema=schema)
        assert "\n" not in str(refusal.value)

    def test_a_file_that_is_not_parquet(self, read: Read) -> None:
        with pytest.raises(SourceError, match=r"cannot read .*events\.parquet as parquet") as refusal:
            read("events.parquet", "event_id\n1\n")
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize("kind", ["parquet", "csv.gz", "jsonl.gz"])
    def test_a_file_that_was_cut_off(
        self, spark: SparkSession, tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / f"cut.{kind}"
        data = gzip.compress(b"".join(b'{"event_id":"%d"}\n' % number for number in range(1000)))
        if kind == "parquet":
            spark.range(1000).coalesce(1).write.parquet(str(tmp_path / "whole"))
            [whole] = (tmp_path / "whole").glob("*.parquet")
            data = whole.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(
            SourceError, match=rf"the file file:/\S*/cut\.{kind} cannot be read \(.+\); if it is cut"
        ) as it:
            read_events(spark, [str(path)])
        assert "\n" not in str(it.value)
        assert "\tat " not in capfd.readouterr().err

    def test_folders_that_spark_would_pass_over(self, spark: SparkSession, tmp_path: Path, write: Write) -> None:
        write("2026/01/events.jsonl", '{"event_id":"a"}\n')
        with pytest.raises(SourceError, match="1 of 1 files would be passed over"):
            read_events(spark, [str(tmp_path)], schema=SCHEMA)
        options = {"recursiveFileLookup": "true"}
        assert read_events(spark, [str(tmp_path)], schema=SCHEMA, options=options).count() == 1


class TestValuesInNamesOfFolders:
    @pytest.fixture(params=["parquet", "json", "csv"])
    def archive(self, spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest) -> str:
        events = spark.sql("SELECT 'a' AS event_id, 1.5 AS amount")
        events.write.option("header", "true").format(request.param).save(f"{tmp_path}/archive/store=007")
        return str(tmp_path / "archive")

    def test_are_texts_or_what_the_schema_says(self, spark: SparkSession, archive: str) -> None:
        assert rows(read_events(spark, [archive]).select("event_id", "store")) == [("a", "007")]
        frame = read_events(spark, [archive], schema="event_id string, amount decimal(2,1)")
        assert rows(frame.select("amount", "store")) == [(Decimal("1.5"), "007")]
        frame = read_events(spark, [archive], schema="event_id string, amount decimal(2,1), store int")
        assert rows(frame.select("amount", "store")) == [(Decimal("1.5"), 7)]

    @pytest.mark.parametrize("before", ["true", "false", None])
    def test_need_a_setting_that_is_put_back(self, spark: SparkSession, tmp_path: Path, before: str | None) -> None:
        spark.sql("SELECT 'a' AS event_id").write.parquet(f"{tmp_path}/store=007")
        (tmp_path / "no.parquet").write_text("no parquet")
        if before is not None:
            spark.conf.set(INFERENCE, before)
        try:
            frame = read_events(spark, [f"{tmp_path}/store=*"], options={"basePath": str(tmp_path)})
            assert spark.conf.get(INFERENCE, None) == before
            with pytest.raises(SourceError):
                read_events(spark, [str(tmp_path / "no.parquet")])
            assert spark.conf.get(INFERENCE, None) == before
            spark.conf.set(INFERENCE, "true")
            assert rows(frame) == [("a", "007")]
        finally:
            spark.conf.unset(INFERENCE)

    def test_alone_are_no_columns_of_csv(self, spark: SparkSession, write: Write, tmp_path: Path) -> None:
        write("store=007/events.csv", "event_id\na\n")
        with pytest.raises(Exception, match="has the column event_id, which the schema does not have"):
            read_events(spark, [str(tmp_path)], schema="store string").collect()


class TestSource:
    def test_the_digest_is_the_same_as_long_as_the_files_are(
        self, spark: SparkSession, tmp_path: Path, write: Write
    ) -> None:
        first, second = write("a.jsonl", "{}"), write("deep/b.jsonl", "{}")
        digests = [source_of(spark, paths).digest for paths in ([str(tmp_path)], [second, first], [str(tmp_path)])]
        assert len(set(digests)) == 1
        assert len(digests[0]) == 32

    @pytest.mark.parametrize("change", ["size", "time", "name", "more", "less"])
    def test_any_change_changes_the_digest(
        self, spark: SparkSession, tmp_path: Path, write: Write, change: str
    ) -> None:
        path = Path(write("a.jsonl", "{}"))
        write("b.jsonl", "{}")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        before = source_of(spark, [str(tmp_path)]).digest
        match change:
            case "size":
                path.write_text("{} ")
                os.utime(path, (1_000_000_000, 1_000_000_000))
            case "time":
                os.utime(path, (1_000_000_001, 1_000_000_001))
            case "name":
                path.rename(tmp_path / "c.jsonl")
            case "more":
                write("deep/c.jsonl", "{}")
            case "less":
                path.unlink()
        assert source_of(spark, [str(tmp_path)]).digest != before

    def test_options_that_choose_files_count(self, spark: SparkSession, tmp_path: Path, write: Write) -> None:
        alone = source_of(spark, [write("a.jsonl", "{}")]).digest
        write("b.txt", json.dumps({}))
        assert source_of(spark, [str(tmp_path)]).digest != alone
        assert source_of(spark, [str(tmp_path)], options={"pathGlobFilter": "*.jsonl"}).digest == alone

    def test_the_description_is_for_people(self, spark: SparkSession, write: Write) -> None:
        paths = [write(f"{number}.jsonl", "{}") for number in range(3)]
        assert source_of(spark, paths[:1]).description == paths[0]
        assert source_of(spark, paths).description == f"{paths[0]} and 2 more"
