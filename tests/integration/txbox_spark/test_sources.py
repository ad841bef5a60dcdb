"""Files in every format and every state, read by a real Spark."""

import gzip
import json
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession

from txbox_spark.reading.errors import SourceError
from txbox_spark.reading.readers import CORRUPT_RECORD
from txbox_spark.reading.sources import read_events, source_of

SCHEMA = "event_id string, amount decimal(12,2), units int"
INFERENCE = "spark.sql.sources.partitionColumnTypeInference.enabled"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write a file and return its path: write(name, text)."""

    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
        return str(path)

    return write


def rows(frame: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.collect()]


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

    def test_has_the_columns_of_every_file(self, spark: SparkSession, archive: str) -> None:
        frame = read_events(spark, [archive])
        assert sorted(frame.columns) == ["day", "event_id", "note", "units"]
        found = sorted(rows(frame.select("event_id", "units", "note", "day")))
        assert found == [("e1", 1, None, "1"), ("e2", 2, "n", "2")]

    def test_has_those_of_one_file_on_request(self, spark: SparkSession, archive: str) -> None:
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
    def path(self, write: Callable[..., str]) -> str:
        good = ['{"event_id":"007","amount":12.10,"units":1}', '{"event_id":"b"}', ""]
        return write("events.jsonl", "\n".join([*good, *self.MALFORMED]) + "\n")

    def test_malformed_lines_stay_with_their_text(self, spark: SparkSession, path: str) -> None:
        frame = read_events(spark, [path], schema=SCHEMA)
        assert frame.columns == ["event_id", "amount", "units", CORRUPT_RECORD]
        found = rows(frame)
        assert found[:2] == [("007", Decimal("12.10"), 1, None), ("b", None, None, None)]
        assert tuple(row[-1] for row in found[2:]) == self.MALFORMED

    def test_they_are_malformed_whatever_is_asked_for(self, spark: SparkSession, path: str) -> None:
        frame = read_events(spark, [path], schema=SCHEMA)
        malformed = frame.where(f"{CORRUPT_RECORD} IS NOT NULL")
        assert malformed.count() == len(self.MALFORMED)
        assert tuple(row[0] for row in malformed.select(CORRUPT_RECORD).collect()) == self.MALFORMED
        assert frame.where(f"{CORRUPT_RECORD} IS NULL").select("event_id").collect() == [("007",), ("b",)]

    def test_columns_are_found_with_exact_numbers_and_texts(
        self, spark: SparkSession, write: Callable[..., str]
    ) -> None:
        path = write(
            "events.json",
            '{"event_id":"007","amount":12.10,"units":1,"lines":[{"price":0.1}]}\n'
            '{"event_id":"008","amount":1234.5,"units":2,"lines":[{"price":0.255}]}\n',
        )
        frame = read_events(spark, [path])
        types = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
        assert types["event_id"] == "string"
        assert types["units"] == "bigint"
        assert "double" not in str(types)
        assert frame.select("event_id", "amount", "units", "lines", CORRUPT_RECORD).collect() == [
            ("007", Decimal("12.1"), 1, [Row(price=Decimal("0.1"))], None),
            ("008", Decimal("1234.5"), 2, [Row(price=Decimal("0.255"))], None),
        ]

    def test_malformed_lines_stay_where_columns_are_found(self, spark: SparkSession, write: Callable[..., str]) -> None:
        frame = read_events(spark, [write("events.json", '{"event_id":"a"}\n{broken\n')])
        assert frame.select("event_id", CORRUPT_RECORD).collect() == [("a", None), (None, "{broken")]

    def test_compressed_and_several(self, spark: SparkSession, tmp_path: Path, write: Callable[..., str]) -> None:
        (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"event_id":"b"}\n'))
        paths = [write("a.jsonl", '{"event_id":"a"}\n'), str(tmp_path / "b.jsonl.gz")]
        assert sorted(row[0] for row in read_events(spark, paths, schema=SCHEMA).collect()) == ["a", "b"]

    @pytest.mark.parametrize("text", ["", "{broken\n"])
    def test_without_a_good_line_there_are_no_columns(
        self, spark: SparkSession, write: Callable[..., str], text: str
    ) -> None:
        path = write("events.json", text)
        with pytest.raises(SourceError, match="no line can be read, so there are no columns"):
            read_events(spark, [path])
        assert len(rows(read_events(spark, [path], schema=SCHEMA))) == text.count("\n")


class TestCsv:
    LINES = (
        "event_id,note,units",
        'a,"",1',
        "b,,",
        'c,"say ""hi"", all",3',
        "d,C:\\dir,4",
        ",no id,5",
        'e,"NULL",6',
    )
    GOOD = (
        ("a", "", 1),
        ("b", None, None),
        ("c", 'say "hi", all', 3),
        ("d", "C:\\dir", 4),
        (None, "no id", 5),
        ("e", "NULL", 6),
    )
    MALFORMED = ("f,too few", "g,too,7,many", "h,no number,x", 'i,no number,""')

    @pytest.fixture
    def path(self, write: Callable[..., str]) -> str:
        return write("events.csv", "\n".join([*self.LINES, *self.MALFORMED]) + "\n")

    def test_values_and_malformed_lines(self, spark: SparkSession, path: str) -> None:
        found = rows(read_events(spark, [path], schema="event_id string, note string, units int"))
        assert tuple(found[: len(self.GOOD)]) == tuple((*row, None) for row in self.GOOD)
        assert tuple(row[-1] for row in found[len(self.GOOD) :]) == self.MALFORMED

    def test_without_a_schema_all_is_text(self, spark: SparkSession, path: str) -> None:
        frame = read_events(spark, [path])
        assert frame.dtypes == [(name, "string") for name in ("event_id", "note", "units", CORRUPT_RECORD)]
        found = rows(frame)
        expected = [(first, note, None if units is None else str(units), None) for first, note, units in self.GOOD]
        assert found[: len(expected)] == expected
        assert [row[-1] for row in found[len(expected) :]] == [*self.MALFORMED[:2], None, None]
        assert found[-1] == ("i", "no number", "", None)

    def test_a_field_in_quotes_holds_line_breaks(self, spark: SparkSession, write: Callable[..., str]) -> None:
        lines = 'event_id,units,note\np-1,5,"order:\np-9,999,fake\nend"\np-2,few,"a\nb"\np-3,3,c\n'
        archive = Path(write("events.csv.gz", ""))
        archive.write_bytes(gzip.compress(lines.encode()))
        for path in (write("events.csv", lines), str(archive)):
            assert rows(read_events(spark, [path], schema="event_id string, units int, note string")) == [
                ("p-1", 5, "order:\np-9,999,fake\nend", None),
                ("p-2", None, "a\nb", 'p-2,few,"a\nb"'),
                ("p-3", 3, "c", None),
            ]

    def test_lines_are_read_one_by_one_on_request(self, spark: SparkSession, write: Callable[..., str]) -> None:
        path = write("events.csv", 'event_id,note\na,"b\nc,d\n')
        assert rows(read_events(spark, [path], options={"MULTILINE": "false"})) == [("a", "b", None), ("c", "d", None)]

    def test_a_quote_that_is_closed_by_another_fields_fails_the_query(
        self, spark: SparkSession, write: Callable[..., str]
    ) -> None:
        path = write("events.csv", 'event_id,note,units\na,"open,1\nb,"c",2\nd,e,3\n')
        schema = "event_id string, note string, units int"
        with pytest.raises(Exception, match="Unescaped quote character"):
            read_events(spark, [path], schema=schema).collect()
        options = {"unescapedQuoteHandling": "STOP_AT_DELIMITER"}
        found = rows(read_events(spark, [path], schema=schema, options=options))
        assert [row[0] for row in found] == ["a", "d"]

    def test_a_quote_that_is_never_closed_takes_in_the_rest(
        self, spark: SparkSession, write: Callable[..., str]
    ) -> None:
        path = write("events.csv", 'event_id,note,units\na,b,1\nc,"open,2\nd,e,3\n')
        found = rows(read_events(spark, [path], schema="event_id string, note string, units int"))
        assert [row[-1] for row in found] == [None, 'c,"open,2\nd,e,3']
        # In the last column it cannot be seen; the module says so.
        path = write("events.csv", 'event_id,note\na,b\nc,"open\n')
        assert rows(read_events(spark, [path])) == [("a", "b", None), ("c", "open\n", None)]

    def test_lines_that_end_with_cr_lf(self, spark: SparkSession, write: Callable[..., str]) -> None:
        path = write("events.csv", 'event_id,note\r\na,b\r\nc,"d\r\ne"\r\nf\r\n')
        assert rows(read_events(spark, [path])) == [("a", "b", None), ("c", "d\ne", None), ("f", None, "f")]

    def test_no_cr_of_a_lines_end_gets_into_an_event(self, spark: SparkSession, write: Callable[..., str]) -> None:
        path = write("events.csv", 'event_id,note\na,b\r\nc,"d"\r\ne,f\n')
        assert rows(read_events(spark, [path])) == [
            ("a", "b\r", 'a,"b\r"'),
            ("c", "d", None),
            ("e", "f", None),
        ]

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            *((text, "12.50") for text in ("12.5", "+12.50", "0012.5000", "1.25e1", "1250E-2", "12.5e+0")),
            *((text, "0.00") for text in ("0", ".0", "-0", "0E-8", "0." + "0" * 50)),
            (".5", "0.50"),
            ("-5.", "-5.00"),
            ("9999999999.990", "9999999999.99"),
            ("1e9", "1000000000.00"),
            ("1" + "0" * 50 + "e-50", "1.00"),
        ],
    )
    def test_decimals(self, spark: SparkSession, write: Callable[..., str], text: str, value: str) -> None:
        path = write("events.csv", f"amount,event_id\n{text},a\n,b\n")
        frame = read_events(spark, [path], schema="amount decimal(12,2), event_id string")
        assert frame.dtypes[:2] == [("amount", "decimal(12,2)"), ("event_id", "string")]
        assert rows(frame) == [(Decimal(value), "a", None), (None, "b", None)]

    def test_texts_that_are_no_decimals_make_records_malformed(
        self, spark: SparkSession, write: Callable[..., str]
    ) -> None:
        malformed = [
            *('"12,50"', '"1,250.00"', "12.505", "10000000000", "1e10", "1e-3", "1e-50", "0.000" + "0" * 50 + "1"),
            *("1e999999999", "much", '""', " 1", "1 ", ".", "e1", "1e", "1_0", "NaN", "\u0661", "0x1", "1.5.", "--1"),
        ]
        lines = [f'"say ""hi""",{text},{number}' for number, text in enumerate(malformed)]
        frame = read_events(spark, [write("events.csv", "\n".join(["event_id,amount,units", *lines]))], schema=SCHEMA)
        assert rows(frame) == [('say "hi"', None, number, line) for number, line in enumerate(lines)]
        assert frame.where(f"{CORRUPT_RECORD} IS NOT NULL").select("event_id").count() == len(malformed)

    def test_decimals_are_exact_at_the_bounds_of_their_types(
        self, spark: SparkSession, write: Callable[..., str]
    ) -> None:
        path = write("events.csv", f"a,`b.c`\n0.{'9' * 38},{'9' * 38}\n1,1{'0' * 38}\n1e-38,1e37\n1e-39,1e38\n")
        frame = read_events(spark, [path], schema="a decimal(38,38), ```b.c``` decimal(38,0)")
        assert rows(frame) == [
            (Decimal("0." + "9" * 38), Decimal("9" * 38), None),
            (None, None, f"1,1{'0' * 38}"),
            (Decimal("1e-38"), Decimal("1e37"), None),
            (None, None, "1e-39,1e38"),
        ]

    def test_a_locale_leaves_decimals_to_spark(self, spark: SparkSession, write: Callable[..., str]) -> None:
        path = write("events.csv", 'event_id,amount,units\na,"12,50",1\n')
        assert rows(read_events(spark, [path], schema=SCHEMA, options={"LOCALE": "de-DE"})) == [
            ("a", Decimal("12.50"), 1, None)
        ]

    def test_the_files_path_can_be_asked_for(self, spark: SparkSession, write: Callable[..., str]) -> None:
        frame = read_events(spark, [write("events.csv", "event_id,amount,units\na,1.5,1\n")], schema=SCHEMA)
        [(path, amount)] = rows(frame.select("_metadata.file_path", "amount"))
        assert path.endswith("/events.csv")
        assert amount == Decimal("1.50")

    def test_they_are_malformed_whatever_is_asked_for(self, spark: SparkSession, path: str) -> None:
        frame = read_events(spark, [path], schema="event_id string, note string, units int")
        assert frame.where(f"{CORRUPT_RECORD} IS NOT NULL").count() == len(self.MALFORMED)
        good = frame.where(f"{CORRUPT_RECORD} IS NULL").select("event_id")
        assert [row[0] for row in good.collect()] == [row[0] for row in self.GOOD]

    def test_a_header_in_another_order_is_not_read_by_position(
        self, spark: SparkSession, write: Callable[..., str]
    ) -> None:
        path = write("events.csv", "amount,event_id\n1,2\n")
        frame = read_events(spark, [path], schema="event_id string, amount string")
        with pytest.raises(Exception, match="CSV header does not conform to the schema"):
            frame.collect()

    def test_options_pass_through_and_win(self, spark: SparkSession, write: Callable[..., str]) -> None:
        path = write("events.csv", "a;-\nb;x\n")
        options = {"HEADER": "false", "sep": ";", "nullValue": "-"}
        frame = read_events(spark, [path], schema="event_id string, note string", options=options)
        assert rows(frame) == [("a", None, None), ("b", "x", None)]

    def test_the_column_of_malformed_lines_has_one_name(self, spark: SparkSession, path: str) -> None:
        with pytest.raises(SourceError, match="columnNameOfCorruptRecord cannot be set"):
            read_events(spark, [path], options={"columnnameofcorruptrecord": "bad"})


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
    def test_a_schema_that_is_none(self, spark: SparkSession, write: Callable[..., str], schema: str) -> None:
        with pytest.raises(SourceError, match=r"schema .* (is not Spark DDL|names no columns)") as refusal:
            read_events(spark, [write("events.csv", "event_id\n1\n")], schema=schema)
        assert "\n" not in str(refusal.value)

    def test_a_file_that_is_not_parquet(self, spark: SparkSession, write: Callable[..., str]) -> None:
        with pytest.raises(SourceError, match=r"cannot read .*events\.parquet as parquet") as refusal:
            read_events(spark, [write("events.parquet", "event_id\n1\n")])
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

    def test_folders_that_spark_would_pass_over(
        self, spark: SparkSession, tmp_path: Path, write: Callable[..., str]
    ) -> None:
        write("2026/01/events.jsonl", '{"event_id":"a"}\n')
        with pytest.raises(SourceError, match="1 of 1 files would be passed over"):
            read_events(spark, [str(tmp_path)], schema=SCHEMA)
        options = {"recursiveFileLookup": "true"}
        assert read_events(spark, [str(tmp_path)], schema=SCHEMA, options=options).count() == 1

    def test_folders_named_by_a_key_are_not_passed_over(
        self, spark: SparkSession, tmp_path: Path, write: Callable[..., str]
    ) -> None:
        write("day=5/events.jsonl", '{"event_id":"a"}\n')
        assert [row.day for row in read_events(spark, [str(tmp_path)], schema=SCHEMA).collect()] == ["5"]


class TestValuesInNamesOfFolders:
    @pytest.fixture(params=["parquet", "json", "csv"])
    def archive(self, spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest) -> str:
        events = spark.sql("SELECT 'a' AS event_id, 1.5 AS amount")
        events.write.option("header", "true").format(request.param).save(f"{tmp_path}/archive/store=007")
        return str(tmp_path / "archive")

    def test_are_texts(self, spark: SparkSession, archive: str) -> None:
        assert rows(read_events(spark, [archive]).select("event_id", "store")) == [("a", "007")]
        frame = read_events(spark, [archive], schema="event_id string, amount decimal(2,1)")
        assert rows(frame.select("amount", "store")) == [(Decimal("1.5"), "007")]

    def test_are_what_the_schema_says(self, spark: SparkSession, archive: str) -> None:
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

    def test_alone_are_no_columns_of_csv(self, spark: SparkSession, write: Callable[..., str], tmp_path: Path) -> None:
        write("store=007/events.csv", "event_id\na\n")
        with pytest.raises(Exception, match="only include the internal corrupt record column"):
            read_events(spark, [str(tmp_path)], schema="store string").collect()


class TestSource:
    def test_the_digest_is_the_same_as_long_as_the_files_are(
        self, spark: SparkSession, tmp_path: Path, write: Callable[..., str]
    ) -> None:
        first, second = write("a.jsonl", "{}"), write("deep/b.jsonl", "{}")
        digests = [source_of(spark, paths).digest for paths in ([str(tmp_path)], [second, first], [str(tmp_path)])]
        assert len(set(digests)) == 1
        assert len(digests[0]) == 32

    @pytest.mark.parametrize("change", ["size", "time", "name", "more", "less"])
    def test_any_change_changes_the_digest(
        self, spark: SparkSession, tmp_path: Path, write: Callable[..., str], change: str
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

    def test_options_that_choose_files_count(
        self, spark: SparkSession, tmp_path: Path, write: Callable[..., str]
    ) -> None:
        alone = source_of(spark, [write("a.jsonl", "{}")]).digest
        write("b.txt", json.dumps({}))
        assert source_of(spark, [str(tmp_path)]).digest != alone
        assert source_of(spark, [str(tmp_path)], options={"pathGlobFilter": "*.jsonl"}).digest == alone

    def test_the_description_is_for_people(self, spark: SparkSession, write: Callable[..., str]) -> None:
        paths = [write(f"{number}.jsonl", "{}") for number in range(3)]
        assert source_of(spark, paths[:1]).description == paths[0]
        assert source_of(spark, paths).description == f"{paths[0]} and 2 more"
