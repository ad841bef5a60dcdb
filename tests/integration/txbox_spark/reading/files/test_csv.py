"""CSV files in every state, read by a real Spark."""

import bz2
import gzip
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from support.spark.event_files import Read, Write, rows
from txbox_spark.reading.errors import SourceError
from txbox_spark.reading.files.readers import CORRUPT_RECORD
from txbox_spark.reading.sources import read_events

SCHEMA = "event_id string, amount decimal(12,2), units int"

DECIMALS = (
    *((text, "12.50") for text in ("12.5", "+12.50", "0012.5000", "1.25e1", "1250E-2", "12.5e+0")),
    *((text, "0.00") for text in ("0", ".0", "-0", "0E-8", "0." + "0" * 50)),
    (".5", "0.50"),
    ("-5.", "-5.00"),
    ("9999999999.990", "9999999999.99"),
    ("1e9", "1000000000.00"),
    ("1" + "0" * 50 + "e-50", "1.00"),
)
READ: dict[str, tuple[str, dict[str, Any], list[tuple[Any, ...]]]] = {
    "lines one by one, on request": (
        'event_id,note\na,"b, 5"" or so"\nc,5" or so\n',
        {"options": {"MULTILINE": "false"}},
        [("a", 'b, 5" or so', None), ("c", '5" or so', None)],
    ),
    "lines that end with CR LF": (
        'event_id,note\r\na,b\r\nc,"d\r\ne"\r\nf\r\n',
        {},
        [("a", "b", None), ("c", "d\ne", None), ("f", None, "f")],
    ),
    "a CR of another line's end, which must not get into an event": (
        'event_id,note\na,b\r\nc,"d"\r\ne,f\n',
        {},
        [("a", "b\r", 'a,"b\r"'), ("c", "d", None), ("e", "f", None)],
    ),
    "no text that is taken for null": (
        "event_id,note\na,\0null\0\n\0null\0,\nb,\0\0\n",
        {},
        [("a", "\0null\0", None), ("\0null\0", None, None), ("b", "\0\0", None)],
    ),
    "decimals": (
        "\n".join(["amount,event_id", *(f"{text},{text}" for text, _ in DECIMALS), ",b"]),
        {"schema": "amount decimal(12,2), event_id string"},
        [*((Decimal(value), text, None) for text, value in DECIMALS), (None, "b", None)],
    ),
    "decimals, exact at the bounds of their types": (
        f"a,`b.c`\n0.{'9' * 38},{'9' * 38}\n1,1{'0' * 38}\n1e-38,1e37\n1e-39,1e38\n",
        {"schema": "a decimal(38,38), ```b.c``` decimal(38,0)"},
        [
            (Decimal("0." + "9" * 38), Decimal("9" * 38), None),
            (None, None, f"1,1{'0' * 38}"),
            (Decimal("1e-38"), Decimal("1e37"), None),
            (None, None, "1e-39,1e38"),
        ],
    ),
    "decimals of a locale, which are left to Spark": (
        'event_id,amount,units\na,"12,50",1\n',
        {"schema": SCHEMA, "options": {"LOCALE": "de-DE"}},
        [("a", Decimal("12.50"), 1, None)],
    ),
    "a header in another order": (
        "amount,event_id\n1,2\n",
        {"schema": "event_id string, amount string"},
        [("2", "1", None)],
    ),
    "options of Spark's, which win": (
        "a;-\nb;x\n",
        {
            "schema": "event_id string, note string",
            "options": {"HEADER": "false", "sep": ";", "nullValue": "-"},
        },
        [("a", None, None), ("b", "x", None)],
    ),
}


@pytest.mark.parametrize("kind", READ)
def test_files_are_read(read: Read, kind: str) -> None:
    text, given, expected = READ[kind]
    assert rows(read("events.csv", text, **given)) == expected


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
    def path(self, write: Write) -> str:
        return write("events.csv", "\n".join([*self.LINES, *self.MALFORMED]) + "\n")

    def test_values_and_lines_that_are_malformed_whatever_is_asked_for(self, spark: SparkSession, path: str) -> None:
        frame = read_events(spark, [path], schema="event_id string, note string, units int")
        found = rows(frame)
        assert tuple(found[: len(self.GOOD)]) == tuple((*row, None) for row in self.GOOD)
        assert tuple(row[-1] for row in found[len(self.GOOD) :]) == self.MALFORMED
        assert frame.where(f"{CORRUPT_RECORD} IS NOT NULL").count() == len(self.MALFORMED)
        good = frame.where(f"{CORRUPT_RECORD} IS NULL").select("event_id")
        assert [row[0] for row in good.collect()] == [row[0] for row in self.GOOD]

    def test_without_a_schema_all_is_text(self, spark: SparkSession, path: str) -> None:
        frame = read_events(spark, [path])
        assert frame.dtypes == [(name, "string") for name in ("event_id", "note", "units", CORRUPT_RECORD)]
        found = rows(frame)
        expected = [(first, note, None if units is None else str(units), None) for first, note, units in self.GOOD]
        assert found[: len(expected)] == expected
        assert [row[-1] for row in found[len(expected) :]] == [*self.MALFORMED[:2], None, None]
        assert found[-1] == ("i", "no number", "", None)

    def test_a_field_in_quotes_holds_line_breaks(self, spark: SparkSession, write: Write) -> None:
        lines = 'event_id,units,note\np-1,5,"order:\np-9,999,fake\nend"\np-2,few,"a\nb"\np-3,3,c\n'
        archive = Path(write("events.csv.gz", ""))
        archive.write_bytes(gzip.compress(lines.encode()))
        for path in (write("events.csv", lines), str(archive)):
            assert rows(read_events(spark, [path], schema="event_id string, units int, note string")) == [
                ("p-1", 5, "order:\np-9,999,fake\nend", None),
                ("p-2", None, "a\nb", 'p-2,few,"a\nb"'),
                ("p-3", 3, "c", None),
            ]

    def test_a_quote_that_is_closed_by_another_fields_fails_the_query(self, spark: SparkSession, write: Write) -> None:
        path = write("events.csv", 'event_id,note,units\na,"open,1\nb,"c",2\nd,e,3\n')
        schema = "event_id string, note string, units int"
        with pytest.raises(Exception, match="Unescaped quote character"):
            read_events(spark, [path], schema=schema).collect()
        options = {"unescapedQuoteHandling": "STOP_AT_DELIMITER"}
        found = rows(read_events(spark, [path], schema=schema, options=options))
        assert [row[0] for row in found] == ["a", "d"]

    @pytest.mark.parametrize("text", ["event_id\n\0\na\n", 'event_id,note\nb,"\0a\0"\n'])
    @pytest.mark.parametrize("encoding", [None, "latin1"])
    def test_nul_is_refused_where_spark_would_drop_it(
        self, spark: SparkSession, write: Write, text: str, encoding: str | None
    ) -> None:
        path = write("events.csv", text)
        assert "\0" in str(rows(read_events(spark, [path], encoding=encoding))).replace("\\x00", "\0")
        with pytest.raises(
            SourceError, match=r"events.csv holds a NUL character.*multiLine=false.*leave multiLine out"
        ):
            read_events(spark, [path], encoding=encoding, options={"multiline": "false"})

    def test_texts_that_are_no_decimals_make_records_malformed(self, read: Read) -> None:
        malformed = [
            *('"12,50"', '"1,250.00"', "12.505", "10000000000", "1e10", "1e-3", "1e-50", "0.000" + "0" * 50 + "1"),
            *("1e999999999", "much", '""', " 1", "1 ", ".", "e1", "1e", "1_0", "NaN", "\u0661", "0x1", "1.5.", "--1"),
        ]
        lines = [f'"say ""hi""",{text},{number}' for number, text in enumerate(malformed)]
        frame = read("events.csv", "\n".join(["event_id,amount,units", *lines]), schema=SCHEMA)
        assert frame.dtypes[1] == ("amount", "decimal(12,2)")
        assert rows(frame) == [('say "hi"', None, number, line) for number, line in enumerate(lines)]
        assert frame.where(f"{CORRUPT_RECORD} IS NOT NULL").select("event_id").count() == len(malformed)

    def test_the_files_path_can_be_asked_for(self, read: Read) -> None:
        frame = read("events.csv", "event_id,amount,units\na,1.5,1\n", schema=SCHEMA)
        [(path, amount)] = rows(frame.select("_metadata.file_path", "amount"))
        assert path.endswith("/events.csv")
        assert amount == Decimal("1.50")

    def test_the_column_of_malformed_lines_has_one_name(self, spark: SparkSession, path: str) -> None:
        with pytest.raises(SourceError, match="columnNameOfCorruptRecord cannot be set"):
            read_events(spark, [path], options={"columnnameofcorruptrecord": "bad"})


class TestUnclosedQuotes:
    """A file that ends within quotes is refused, and no other."""

    GOOD = (
        ("", []),
        ("id,note", []),
        ('id,"no\nte"\na,b', [("a", "b")]),
        ('id,note\na,"b"', [("a", "b")]),
        ('id,note\na,"b"\n\n\n', [("a", "b")]),
        ('id,note\na,""\n"",b\n', [("a", ""), ("", "b")]),
        ('id,note\na,5" pipe\nb"c",d"\n', [("a", '5" pipe'), ('b"c"', 'd"')]),
        ('id,note\na, "b\nc,d\n', [("a", ' "b'), ("c", "d")]),
        ('id,note\na,"b" \t\nc,d\n', [("a", "b"), ("c", "d")]),
        ('id,note\na,"""b"""\nc,""""\n', [("a", '"b"'), ("c", '"')]),
        ('id,note\na,"\nb\n"\nc,"\nd,""e""\n\n"', [("a", "\nb\n"), ("c", '\nd,"e"\n\n')]),
        ('id,note\n"\n","\n"\n"a","5"""', [("\n", "\n"), ("a", '5"')]),
        ('id,note\r\na,"b\r\nc"\r\nd,"e"\r\n', [("a", "b\nc"), ("d", "e")]),
        ('id,note\r\na,"b"\nc,"d"\r\n\n"e","f"\n', [("a", "b"), ("c", "d"), ("e", "f")]),
        ('id,note\ra,"b"\rc,"d"\r', [("a", "b"), ("c", "d")]),
        ('\ufeff"id",note\na,"b"\n', [("a", "b")]),
        ("id,note\na," + '""' * 9 + '"' + 100_000 * '""' + '"', [("a", 100_009 * '"')]),
    )
    UNCLOSED = (
        ('"id,note\na,b\n', '"id,note'),
        ('id,"note\na,b\n', 'id,"note'),
        ('id,note\na,b\nc,"', 'c,"'),
        ('id,note\na,b\nc,"\n', 'c,"'),
        ('id,note\na,"open\nb,c\nd,e', 'a,"open'),
        ('id,note\na,"b"\nc,"d""', 'c,"d""'),
        ('id,note\na,5" pipe\nb,"5"" pipe\n', 'b,"5"" pipe'),
        ('id,note\na,"\nb\n"\nc,"\nd', 'c,"'),
        ('id,note\n"\n"\n"\n', '"'),
        ('id,note\r\na,"b\r\nc,d\r\n', 'a,"b'),
        ('id,note\r\na,"b"\nc,"d\ne,f\r\n', 'a,"b" c,"d e,f'),
        ('id,note\ra,"b\rc,d\r', 'a,"b'),
        ('\ufeff"id",note\na,"b\n', 'a,"b'),
        ('id,note\na,"x" , y\nb,"é\n', 'b,"é'),
        ('id,note\n"a\nb" ,"c\nd\n', 'b" ,"c'),
        ("id,note\na," + 100_000 * '""' + '"b\n', 'a,""'),
    )

    def test_files_whose_quotes_are_closed_are_read(self, spark: SparkSession, write: Write) -> None:
        for number, (text, _) in enumerate(self.GOOD):
            write(f"kind=good/{number}.csv", text)
        folder = str(Path(write("kind=good/_", "")).parent)
        options = {"enforceSchema": "true"}  # of a header in other words
        frame = read_events(spark, [folder], schema="id string, note string", options=options)
        found = rows(frame.select("_metadata.file_name", "id", "note", CORRUPT_RECORD))
        for number, (_, expected) in enumerate(self.GOOD):
            assert [row[1:] for row in found if row[0] == f"{number}.csv"] == [(*row, None) for row in expected]

    def test_files_that_end_within_quotes_are_refused(self, spark: SparkSession, write: Write) -> None:
        files = [write("files/good.csv", 'id,note\na,"b"\n')]
        files += [write(f"files/value={number}/bad.csv", text) for number, (text, _) in enumerate(self.UNCLOSED)]
        with pytest.raises(SourceError, match=rf"/bad.csv ends within quotes.*Such files: {len(self.UNCLOSED)}$"):
            read_events(spark, files, schema="id string, note string")

    @pytest.mark.parametrize("number", [0, 4, 7, 10, 11, 12, 15])
    def test_the_line_is_shown_whose_quote_it_seems_to_be(self, read: Read, number: int) -> None:
        text, begin = self.UNCLOSED[number]
        with pytest.raises(SourceError, match=r"bad.csv ends within quotes.*Such files: 1") as caught:
            read("bad.csv", text, schema="id string, note string")
        assert f"begins with {begin}" in str(caught.value)

    @pytest.mark.parametrize(
        ("options", "good", "bad"),
        [
            ({"SEP": "\\t"}, 'a\t"b\n"\t\n', 'a\t"b\n'),
            ({"delimiter": ";"}, 'a,"b;c\n', 'a;"b\n'),
            ({"sep": "||"}, 'a|"b||"c"\n', 'a||"b\n'),
            ({"quote": "'"}, "a\"b,'c\n'\n", "a,'c\n"),
            ({"escape": "\\"}, 'a,"b\\""\nc,"d\\\\"\n', 'a,"b\\"\n'),
            ({"escape": ""}, 'a,"b\\"\n', 'a,"b\n'),
            ({"comment": "#"}, '#"\na,b\n', '#"\na,"#\n#\n'),
            ({"ignoreLeadingWhiteSpace": "true"}, 'a, "b\n"\n', 'a, "b\n'),
            ({"ignoreTrailingWhiteSpace": "true"}, 'a,"b" \n', 'a,"b \n'),
            ({"lineSep": ";"}, 'a,b;c,"d;"', 'a,b;c,"d;'),
            ({"multiLine": "false"}, 'a,"b"\n', 'a,"b\nc"\n'),
            ({"encoding": "latin1"}, 'a,"b\n"\n', 'a,"b\n'),
            ({"encoding": "utf-16"}, 'a,"\u0a0a\n"\n', 'a,"\u0a0a\n'),
            ({"encoding": "utf-16", "quote": "\u201c"}, 'a,"b\n', "a,\u201cb\n"),
        ],
    )
    def test_as_the_options_say(
        self, spark: SparkSession, write: Write, options: dict[str, str], good: str, bad: str
    ) -> None:
        encoding, given = options.get("encoding", "utf-8"), {"header": "false", **options}
        paths = [write("good.csv", good.encode(encoding)), write("bad.csv", bad.encode(encoding))]
        said = r"bad.csv (ends within|has a quote that is not closed on its l).*Such (files|lines in all files): 1\b"
        with pytest.raises(SourceError, match=said):
            read_events(spark, paths, schema="id string, note string", options=given)

    @pytest.mark.parametrize("options", [{}, {"multiLine": "false"}, {"encoding": "utf-16"}])
    def test_quotes_are_plain_text_on_request(self, read: Read, options: dict[str, str]) -> None:
        given = {"header": "false", "quote": "", **options}
        frame = read(
            "open.csv",
            'a,"b\nc,d\n'.encode(options.get("encoding", "utf-8")),
            schema="id string, note string",
            options=given,
        )
        assert rows(frame) == [("a", '"b', None), ("c", "d", None)]

    def test_compressed_files(self, spark: SparkSession, write: Write) -> None:
        for name, content in (("cut.csv.gz", gzip.compress), ("cut.csv.bz2", bz2.compress)):
            path = Path(write(name, ""))
            path.write_bytes(content(b'id,note\na,b\nc,"d\n'))
            with pytest.raises(SourceError, match=f"{name} ends within quotes"):
                read_events(spark, [str(path)])

    def test_it_is_as_spark_reads(self, spark: SparkSession, tmp_path: Path) -> None:
        """Whether a record behind a file, or behind it and a quote, is one by itself tells how the file ends."""
        random_texts = random.Random(7)
        texts = ["".join(random_texts.choices('a ,""\n', k=random_texts.randint(1, 12))) for _ in range(200)]
        ends = {}
        for probe in ("\nprobe,x\n", '\n"\nprobe,x\n'):
            folder = tmp_path / f"probe{len(probe)}"
            folder.mkdir()
            for number, text in enumerate(texts):
                (folder / f"{number}.csv").write_text(text + probe)
            options = {"multiLine": "true", "escape": '"', "unescapedQuoteHandling": "RAISE_ERROR"}
            read = spark.read.options(**options, ignoreCorruptFiles="true").schema("a string, b string")
            found = read.csv(str(folder)).where("a = 'probe'").select("_metadata.file_name")
            ends[probe] = {int(row[0].removesuffix(".csv")) for row in found.collect()}
        outside, within = ends.values()
        assert len(outside - within) > 50
        assert len(within - outside) > 50
        folder = tmp_path / "read"
        folder.mkdir()
        for number in outside ^ within:
            (folder / f"{number}.csv").write_text(texts[number])
        options = {"header": "false"}
        with pytest.raises(SourceError, match=f"Such files: {len(within - outside)}$"):
            read_events(spark, [str(folder)], schema="a string, b string", options=options)
        for number in within - outside:
            (folder / f"{number}.csv").unlink()
        read_events(spark, [str(folder)], schema="a string, b string", options=options).collect()
