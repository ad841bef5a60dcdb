"""Files as pandas and spreadsheets write them: loaded where the meaning is plain, or refused in one line."""

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from pyspark.sql import DataFrame, SparkSession

from support.spark.event_files import Read, Write
from txbox_spark.reading.errors import SourceError
from txbox_spark.reading.files.readers import CORRUPT_RECORD
from txbox_spark.reading.sources import read_events

NANOSECONDS = 1_767_225_600_123_456_000


def rows(frame: DataFrame) -> list[dict[str, Any]]:
    found = [row.asDict() for row in frame.collect()]
    assert [row for row in found if row.pop(CORRUPT_RECORD, None) is not None] == []
    return sorted(found, key=lambda row: str(row["event_id"]))


def refused(spark: SparkSession, paths: list[str], said: str, **given: Any) -> None:
    with pytest.raises(SourceError, match=said) as raised:
        read_events(spark, paths, **given)
    assert "\n" not in str(raised.value)


class TestCsv:
    def test_a_column_without_a_name_as_the_index_of_pandas_is_kept(self, read: Read) -> None:
        frame = read("a.csv", ",event_id,cents\n0,p-1,5\n1,p-2,\n")
        assert rows(frame) == [
            {"_c0": "0", "event_id": "p-1", "cents": "5"},
            {"_c0": "1", "event_id": "p-2", "cents": None},
        ]
        latin = read("b.csv", "event_id,\né,5\n".encode("latin1"), encoding="latin1")
        assert rows(latin) == [{"event_id": "é", "_c1": "5"}]

    @pytest.mark.parametrize("header", [True, False])
    def test_files_with_their_columns_in_another_order(self, spark: SparkSession, write: Write, header: bool) -> None:
        paths = [
            write("1.csv", "\ufeffevent_id,cents,note\np-1,5,é\n"),
            write("2.csv", '"note",CENTS,event_id\nb,6,p-2\n'),
            write("3.csv.gz", "event_id,cents,note\np-3,7,c\n"),
        ]
        given = {} if header else {"schema": "event_id string, cents decimal(5,1), note string"}
        found = rows(read_events(spark, paths, **given))
        cents = ["5", "6", "7"] if header else [Decimal(5), Decimal(6), Decimal(7)]
        assert found == [
            {"event_id": "p-1", "cents": cents[0], "note": "é"},
            {"event_id": "p-2", "cents": cents[1], "note": "b"},
            {"event_id": "p-3", "cents": cents[2], "note": "c"},
        ]

    def test_another_order_in_another_encoding_below_folders(self, spark: SparkSession, write: Write) -> None:
        first = write("x/store=007/1.csv", "event_id,prix\np-1,é\n".encode("latin1"))
        write("x/store=008/2.csv", "prix,event_id\nü,p-2\n".encode("latin1"))
        folder = str(Path(first).parent.parent)
        assert rows(read_events(spark, [folder], encoding="latin1")) == [
            {"event_id": "p-1", "prix": "é", "store": "007"},
            {"event_id": "p-2", "prix": "ü", "store": "008"},
        ]

    def test_files_without_a_header_beside_two_orders(self, spark: SparkSession, write: Write) -> None:
        first = write("a.csv", "\n\n")
        write("c.csv.gz", "")
        write("d.csv", "# by hand\nevent_id,n\n1,x\n")
        write("e.csv", "\n# by hand\nn,event_id\ny,2\n")
        write("f.csv", '"n","event_id"\nz,3\n')
        found = rows(read_events(spark, [str(Path(first).parent)], options={"Header": "TRUE", "comment": "#"}))
        assert found == [{"event_id": key, "n": n} for key, n in (("1", "x"), ("2", "y"), ("3", "z"))]

    def test_a_damaged_file_that_is_passed_over_takes_no_other_with_it(
        self, spark: SparkSession, write: Write, tmp_path: Path
    ) -> None:
        (tmp_path / "a.csv.gz").write_bytes(b"damaged")
        write("b.csv", "event_id,n\n1,x\n")
        write("c.csv", "n,event_id\ny,2\n")
        found = rows(read_events(spark, [str(tmp_path)], options={"ignoreCorruptFiles": "true"}))
        assert found == [{"event_id": "1", "n": "x"}, {"event_id": "2", "n": "y"}]

    def test_another_order_behind_a_name_with_a_line_break(self, spark: SparkSession, write: Write) -> None:
        paths = [
            write("1.csv", '"in\ntwo",event_id,n\na,1,x\n'),
            write("2.csv", '"in\ntwo",n,event_id\nb,y,2\n'),
        ]
        assert rows(read_events(spark, paths)) == [
            {"in\ntwo": "a", "event_id": "1", "n": "x"},
            {"in\ntwo": "b", "event_id": "2", "n": "y"},
        ]

    def test_headers_that_do_not_do_are_refused_with_the_file_and_the_names(
        self, spark: SparkSession, write: Write
    ) -> None:
        plain = write("0.csv", "event_id,cents\np-1,5\n")
        refused(spark, [write("1.csv", "event_id,cents,cents\np,5,6\n")], r"1\.csv has two columns named cents; rename")
        refused(
            spark, [write("2.csv", "event_id,Cents,cents\np,5,6\n")], r"2\.csv has two columns named Cents and cents"
        )
        refused(spark, [write("3.csv", "event_id,,\np,5,6\n")], r"3\.csv has two columns without a name; name them")
        refused(spark, [write("4.csv", ",_c0,event_id\n0,1,p\n")], r"4\.csv has two columns named _c0")
        refused(
            spark, [write("7.csv", "_corrupt_record,event_id\na,p\n")], r"7\.csv has a column _corrupt_record, which"
        )
        more = write("5.csv", "event_id,cents,note\np-2,5,a\n")
        refused(spark, [plain, more], r"5\.csv has the column note, which .*0\.csv does not have: its")
        without = write("6.csv", "p-2,7\n")
        refused(spark, [plain, without], r"6\.csv has no column event_id, cents, which .*: its header is p-2,7")
        pandas = write("8.csv", ",event_id,cents\n0,p-3,5\n")
        unnamed = r"_c0 \(so Spark calls a column without a name\), which"
        refused(spark, [plain, pandas], rf"8\.csv has the column {unnamed} .*0\.csv does not have: its")
        refused(
            spark, [pandas, write("9.csv", "event_id,cents\np-1,5\n")], rf"9\.csv has no column {unnamed} .*8\.csv has"
        )
        schema = "event_id string, amount int"
        refused(spark, [plain], r"no column amount, which the schema has and has the column cents,", schema=schema)


def test_numbers_of_json_with_exponents(spark: SparkSession, write: Write, read: Read) -> None:
    lines = [
        '{"event_id": "1", "n": 1.5e3, "large": 1e+16, "some": [{"x": 2E2}], "mixed": 1e2, "no": 1e37}',
        '{"event_id": "2", "n": 2, "large": 3e0, "some": [{"x": 0.5}], "mixed": 12345678901234567890, "no": 1e-1}',
    ]
    found = rows(read("a.jsonl", "\n".join(lines)))
    assert [row["n"] for row in found] == [Decimal(1500), Decimal(2)]
    assert [row["large"] for row in found] == [Decimal(10**16), Decimal(3)]
    assert [row["some"][0]["x"] for row in found] == [Decimal(200), Decimal("0.5")]
    assert [row["mixed"] for row in found] == [Decimal(100), Decimal(12345678901234567890)]
    assert [row["no"] for row in found] == [1e37, 0.1]
    refused(spark, [write("b.jsonl", '{"event_id": "1", "n": 1e400}')], "column n has a number that a decimal of 38")


class TestParquet:
    @pytest.fixture
    def put(self, tmp_path: Path) -> Callable[..., str]:
        def put(name: str, **columns: Any) -> str:
            (path := tmp_path / name).parent.mkdir(exist_ok=True)
            parquet.write_table(pyarrow.table(columns), str(path))
            return str(path)

        return put

    def test_timestamps_of_nanoseconds(self, spark: SparkSession, put: Callable[..., str]) -> None:
        def times(*values: int | None, zone: str | None = None) -> Any:
            return pyarrow.array(values, pyarrow.timestamp("ns", tz=zone))

        start, before = [NANOSECONDS], [-1_000, None]  # a microsecond before 1970
        paths = [
            put("1.parquet", event_id=["1"], at=times(*start), utc=times(*start, zone="UTC"), n=start),
            put("2.parquet", event_id=["2", "3"], at=times(*before), utc=times(*before, zone="UTC"), n=[1, 2]),
        ]
        frame = read_events(spark, paths)
        assert dict(frame.dtypes) == {"event_id": "string", "at": "timestamp_ntz", "utc": "timestamp", "n": "bigint"}
        found = rows(frame.selectExpr("event_id", "CAST(at AS string)", "unix_micros(utc) AS utc", "n"))
        assert [tuple(row.values()) for row in found] == [
            ("1", "2026-01-01 00:00:00.123456", NANOSECONDS // 1000, NANOSECONDS),
            ("2", "1969-12-31 23:59:59.999999", -1, 1),
            ("3", None, None, 2),
        ]
        finer = put("3.parquet", event_id=["1"], at=times(NANOSECONDS + 1))
        refused(spark, [finer], "column at has a time with nanoseconds, which no timestamp of Postgres holds; write")
        kept = read_events(spark, [finer], schema="event_id string, at bigint")
        assert rows(kept) == [{"event_id": "1", "at": NANOSECONDS + 1}]
        said = "column at is a time of nanoseconds in one file, and another type in"
        refused(spark, [paths[0], put("4.parquet", event_id=["4"], at=[5])], said)
        micros = pyarrow.array([5], pyarrow.timestamp("us"))
        refused(spark, [paths[0], put("6.parquet", event_id=["6"], at=micros)], said)
        named = read_events(spark, [put("7.parquet", event_id=["7"], **{"at (UTC)": times(*start)})])
        assert dict(named.dtypes)["at (UTC)"] == "timestamp_ntz"
        nested = put(
            "5.parquet",
            event_id=["5"],
            one=pyarrow.array([{"at": NANOSECONDS}], pyarrow.struct({"at": "timestamp[ns]"})),
        )
        refused(spark, [nested], "column one holds times of nanoseconds within; write")

    def test_widths_in_folders_with_names_that_are_patterns(self, spark: SparkSession, put: Callable[..., str]) -> None:
        first = put("k=ü %/[1].parquet", event_id=["1"], n=pyarrow.array([1], "int8"))
        put("k={a,b}/{2}.parquet", event_id=["2"], n=pyarrow.array([2**40], "int64"))
        assert rows(read_events(spark, [str(Path(first).parent.parent)])) == [
            {"event_id": "1", "n": 1, "k": "ü %"},
            {"event_id": "2", "n": 2**40, "k": "{a,b}"},
        ]

    def test_whole_numbers_of_several_widths(self, spark: SparkSession, put: Callable[..., str]) -> None:
        paths = [
            put("1.parquet", event_id=["1"], n=pyarrow.array([1], "int32"), small=pyarrow.array([1], "int8")),
            put("2.parquet", event_id=["2"], n=pyarrow.array([2**40], "int64"), small=pyarrow.array([300], "int16")),
            put("3.parquet", event_id=["3"], n=pyarrow.nulls(1)),
        ]
        for order in (paths, paths[::-1]):
            assert rows(read_events(spark, order)) == [
                {"event_id": "1", "n": 1, "small": 1},
                {"event_id": "2", "n": 2**40, "small": 300},
                {"event_id": "3", "n": None, "small": None},
            ]
        other = put("4.parquet", event_id=["4"], n=["x"])
        refused(spark, [*paths[:2], other], "cannot be merged.*Give a schema with types that hold what every file has")


@pytest.mark.parametrize("format_", ["orc", "avro"])
def test_formats_that_are_not_read(spark: SparkSession, write: Write, format_: str) -> None:
    path = write(f"a.{format_}", "x")
    said = rf"events are read from parquet, json, csv, and not from {format_}; .*spark\.read\.format\('{format_}'\)"
    refused(spark, [path], said)
    refused(spark, [path], said, format=format_)
