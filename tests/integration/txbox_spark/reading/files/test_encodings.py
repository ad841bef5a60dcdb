"""Bytes that are not in the encoding of their file: reported, row by row, and never changed into something else."""

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from support.spark.bulk_loads import COPY_FIRST, Books, counts, load
from support.spark.event_files import Read, Write, rows
from txbox_spark import SourceError, read_events
from txbox_spark.reading.files.readers import CORRUPT_RECORD

KEEP = "INSERT INTO effect (event_id) SELECT event_id || '|' || name FROM fresh_event"
FIELDS = "event_id string, name string"
FFFD = "\ufffd"

IDS = ("MUNCHÉN-1", "MUNCHÈN-1", "Müller-7", "Möller-7")


def applied(books: Books) -> list[str]:
    """The ids and names that arrived, as ``KEEP`` writes them."""
    return sorted(str(one[0]) for one in books.effects().elements())


def lines(kind: str, events: list[tuple[bytes, bytes]]) -> bytes:
    """Events as lines of CSV or JSON, whatever their bytes are."""
    if kind == "csv":
        return b"event_id,name\n" + b"".join(b'%b,"%b"\n' % event for event in events)
    return b"".join(b'{"event_id":"%b","name":"%b"}\n' % event for event in events)


@pytest.mark.parametrize("writer", COPY_FIRST)
@pytest.mark.parametrize("kind", ["csv.gz", "jsonl"])
def test_rows_that_are_not_utf8_are_rejected_and_the_others_arrive(
    books: Books, schema_url: str, read: Read, writer: str, kind: str
) -> None:
    """The ids differ in bytes that a lenient reader makes the same; U+FFFD that is in the file is a character."""
    good = [("p-1", "naïve €"), (FFFD, "x"), (f"p{FFFD}", FFFD), ("日本", "🎉"), ("p-1", "naïve €")]
    bad = [(one.encode("latin1"), b"x") for one in IDS] + [(b"p-9", b"Stra\xdfe"), (b"cut\xe2\x82", b"\xed\xa0\x80")]
    mixed = [(id_.encode(), name.encode()) for id_, name in good]
    mixed[2:2] = bad
    report = load(
        read(f"events.{kind}", lines(kind.partition(".")[0], mixed), schema=FIELDS), schema_url, writer, apply=KEEP
    )
    assert counts(report) == {
        "read": 11, "rejected": 6, "duplicate_in_source": 1, "already_processed": 0, "applied": 4
    }  # fmt: skip
    assert applied(books) == sorted(f"{id_}|{name}" for id_, name in set(good))
    assert books.inbox() == sorted({id_ for id_, _ in good})
    for said in report.rejected_sample:
        assert "malformed record: not UTF-8 in column " in said
        assert f"events.{kind}" in said
    if writer == "copy":
        said = "\n".join(report.rejected_sample)
        assert "not UTF-8 in column event_id of " in said
        assert "not UTF-8 in column name of " in said
        assert "not UTF-8 in column event_id, column name of " in said


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("encoding", ["latin1", "cp1252"])
def test_a_file_loads_exactly_in_the_encoding_that_is_named(
    spark: SparkSession, books: Books, schema_url: str, write: Write, kind: str, encoding: str
) -> None:
    name = "Stra\u00dfe \u20ac" if "1252" in encoding else "Stra\u00dfe \u00a4 \x85"
    path = write(f"e.{kind}", lines(kind, [(one.encode(encoding), name.encode(encoding)) for one in IDS]))
    events = read_events(spark, [path], schema=FIELDS, encoding=encoding)
    report = load(events, schema_url, "copy", apply=KEEP)
    assert (report.read, report.rejected) == (4, 0)
    assert applied(books) == sorted(f"{one}|{name}" for one in IDS)
    assert rows(read_events(spark, [path], encoding=encoding)) == [(one, name, None) for one in IDS]


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_rows_with_lone_surrogates_are_rejected(books: Books, schema_url: str, read: Read, writer: str) -> None:
    """JSON can escape half of a surrogate pair, in plain ASCII. It is no character, and Java puts "?" for it."""
    report = load(
        read(
            "e.jsonl",
            lines(
                "jsonl", [(rb"a\ud800", b"1"), (rb"a\uD801", b"2"), (b"a?", b"4"), (b"b", rb"\udc00x"), (b"c", b"?")]
            ),
            schema=FIELDS,
        ),
        schema_url,
        writer,
        apply=KEEP,
    )
    assert counts(report) == {
        "read": 5, "rejected": 3, "duplicate_in_source": 0, "already_processed": 0, "applied": 2
    }  # fmt: skip
    assert applied(books) == ["a?|4", "c|?"]
    assert books.inbox() == ["a?", "c"]
    for said in report.rejected_sample:
        assert "malformed record: lone surrogate (half of a character, such as \\ud800) in column " in said
        assert "e.jsonl" in said


class TestCsv:
    def test_records_of_several_lines_names_and_other_types(self, read: Read) -> None:
        frame = read(
            "e.csv",
            'straße;betrag;größe\n"a\nb";1,5;1\n'.encode()
            + b'"c\nM\xfcller\nd";2.5;2\nok;3.5;much\nM\xfc;x;3\n'
            + f'"é\n{FFFD}";4.5;4\n'.encode(),
            schema="`straße` string, betrag decimal(5,1), `größe` int",
            options={"sep": ";"},
        )
        assert frame.columns == ["straße", "betrag", "größe", CORRUPT_RECORD]
        found = rows(frame)
        assert found[0] == ("a\nb", None, 1, '"a\nb";1,5;1'.replace(";", ",").replace("1,5", '"1,5"'))
        assert found[2][2:] == (None, "ok;3.5;much")
        assert found[4] == (f"é\n{FFFD}", *found[4][1:3], None)
        assert [str(found[4][1]), found[4][2]] == ["4.5", 4]
        for row in (found[1], found[3]):
            assert row[-1].startswith("not UTF-8 in column straße of file:/")
            assert "/e.csv (" in row[-1]
        assert f"M{FFFD}ller" in found[1][-1]

    @pytest.mark.parametrize("options", [{}, {"multiLine": "false"}])
    @pytest.mark.parametrize("schema", [FIELDS, None])
    def test_byte_order_marks(
        self, spark: SparkSession, write: Write, options: dict[str, str], schema: str | None
    ) -> None:
        mark = b"\xef\xbb\xbf"
        paths = [
            write("a.csv", mark + b"event_id,name\na,M\xfc\nb,\xc3\xbc\n"),
            write("b.csv", b"event_id,name\nc,\xc3\xbc\n"),
            write("c.csv.gz", mark + b"event_id,name\nd,\xc3\xbc\n"),
        ]
        for some, expected in ((paths, "bcd"), (paths[:1], "b")):
            frame = read_events(spark, some, schema=schema, options=options)
            assert frame.columns == ["event_id", "name", CORRUPT_RECORD]
            found = rows(frame)
            assert sorted(row for row in found if row[-1] is None) == [(one, "ü", None) for one in expected]
            [said] = [row[-1] for row in found if row[-1] is not None]
            assert "not UTF-8 in column name of " in said

    def test_a_mark_without_a_header_is_no_part_of_an_id(self, read: Read) -> None:
        with pytest.raises(SourceError, match="begins with a byte order mark and has no header"):
            read("a.csv", b"\xef\xbb\xbfa,M\xfc\n", schema=FIELDS, options={"header": "false"})
        assert rows(read("b.csv", b"a,M\xfc\n", schema=FIELDS, options={"header": "false"}))

    @pytest.mark.parametrize("schema", ["event_id string, `straße` string", None])
    def test_a_header_that_is_not_utf8(self, spark: SparkSession, write: Write, schema: str | None) -> None:
        path = write("e.csv", "event_id,straße\na,b\n".encode("latin1"))
        with pytest.raises(Exception, match=r"header.*not UTF-8|CSV header does not conform"):
            read_events(spark, [path], schema=schema).collect()
        assert rows(read_events(spark, [path], schema=schema, encoding="cp1252")) == [("a", "b", None)]

    def test_bytes_that_the_named_encoding_does_not_have(self, read: Read) -> None:
        [good, bad] = rows(read("e.csv", b"event_id,name\na,\x80\nb\x81,c\n", schema=FIELDS, encoding="cp1252"))
        assert good == ("a", "€", None)
        assert "not windows-1252 in column event_id of " in bad[-1]

    def test_utf_16(self, read: Read) -> None:
        data = f"event_id,name\nä,€ 🎉\n{FFFD},x\n".encode("utf-16")
        [good, bad] = rows(read("e.csv", data, encoding="utf-16"))
        assert good == ("ä", "€ 🎉", None)
        assert "not UTF-16 in column event_id of " in bad[-1]
        with pytest.raises(SourceError, match="not UTF-8"):
            read("e.csv", data)

    def test_lone_surrogates(self, spark: SparkSession, write: Write) -> None:
        data = "event_id,name\na\ud800,x\na?,y\nb,\udc00\nc,😀\n"
        path = write("e.csv", data.encode("utf-32", "surrogatepass"))
        with pytest.raises(SourceError, match="UTF-32 cannot be read so that nothing is changed; convert"):
            read_events(spark, [path], schema=FIELDS, encoding="utf-32")
        path = write("e.csv", data.encode("utf-16", "surrogatepass"))
        found = rows(read_events(spark, [path], schema=FIELDS, encoding="utf-16"))
        assert [row[:2] for row in found if row[-1] is None] == [("a?", "y"), ("c", "😀")]
        assert len(found) == 4

    def test_values_in_names_of_folders(self, spark: SparkSession, write: Write, tmp_path: Path) -> None:
        write("in/store=ä7/e.csv", b"event_id,name\na,b\nc\xff,d\n")
        for schema in (FIELDS, None):
            frame = read_events(spark, [str(tmp_path / "in")], schema=schema)
            assert rows(frame.where(f"{CORRUPT_RECORD} IS NULL").drop(CORRUPT_RECORD)) == [("a", "b", "ä7")]


class TestJson:
    def test_keys_values_and_nested_ones(self, spark: SparkSession, write: Write) -> None:
        good = {"event_id": "ä", "name": f"{FFFD} \u0000 €", "n": 1.5, "in": {"größe": [FFFD, "ß"]}}
        path = write(
            "e.jsonl",
            b'\xef\xbb\xbf{"event_id":"bom"}\n\n  \r\n{"event_id":"k","n\xe4me":"x"}\r\n'
            + json.dumps(good, ensure_ascii=False).encode()
            + b'\n{"event_id":"v","in":{"gr\xc3\xb6\xc3\x9fe":["\xff"]}}\n'
            + b'{"event_id":"esc","name":"\\ufffd"}\n{broken\n',
        )
        for schema in ("event_id string, name string, n decimal(3,1), in struct<`größe`: array<string>>", None):
            frame = read_events(spark, [path], schema=schema)
            found = frame.select("event_id", "name", "n", "in", CORRUPT_RECORD).collect()
            assert [row[0] for row in found] == ["bom", None, "ä", None, "esc", None]
            assert found[2][1] == good["name"]
            assert str(found[2][2]) == "1.5"
            assert list(found[2][3][0]) == [FFFD, "ß"]
            assert found[4][1] == FFFD
            assert found[5][-1] == "{broken"
            assert found[1][-1].startswith("not UTF-8 in the line of file:/")
            assert found[3][-1].startswith("not UTF-8 in column in of file:/")
            assert [row[-1] for row in found[::2]] == [None] * 3
            assert "n\ufffdme" not in frame.columns

    def test_values_in_names_of_folders(self, spark: SparkSession, write: Write, tmp_path: Path) -> None:
        write("in/store=007/e.jsonl", b'{"event_id":"a"}\n{"event_id":"\xff"}\n')
        for schema, store in ((None, "007"), ("event_id string", "007"), ("event_id string, store int", 7)):
            frame = read_events(spark, [str(tmp_path / "in")], schema=schema)
            assert rows(frame.where(f"{CORRUPT_RECORD} IS NULL").select("event_id", "store")) == [("a", store)]

    @pytest.mark.parametrize("encoding", [None, "cp1252"])
    def test_escapes_of_lone_surrogates(self, read: Read, encoding: str | None) -> None:
        """A pair is a character, and after an escaped backslash there is no escape."""
        good = {
            "g1": (r"\ud83d\ude00 \uD83D\uDE00", "😀 😀"),
            "g2": (r"\\ud800 \\\\ud800", r"\ud800 \\ud800"),
            "g3": (r"\\\ud83d\ude00?", "\\😀?"),
            "g4": ("?", "?"),
        }
        bad = {
            "b1": r"\ud83d\ud83d\ude00",
            "b2": r"\ud83d\ude00\uDE00",
            "b3": r"\\\uDBFF",
            "b4": r"\\ud83d\ude00",
            "b5": r"\ud83d \ude00",
            "b6": r"\ud83d\\ude00",
        }
        texts = {name: text for name, (text, _) in good.items()} | bad
        data = "".join(f'{{"event_id":"{name}","text":"{text}"}}\n' for name, text in texts.items())
        for schema in ("event_id string, text string", None):
            frame = read("e.jsonl", data.encode(), schema=schema, encoding=encoding)
            found = frame.select("event_id", "text", CORRUPT_RECORD).collect()
            assert [tuple(row) for row in found[: len(good)]] == [(name, to, None) for name, (_, to) in good.items()]
            for row, text in zip(found[len(good) :], bad.values(), strict=True):
                assert tuple(row[:2]) == (None, None)
                assert row[-1].startswith(
                    "lone surrogate (half of a character, such as \\ud800) in column text of file:/"
                )
                assert text in row[-1]

    _NESTED = (
        r'{"event_id":"a","in":{"x":["ok","\udfff"]}}',
        r'{"event_id":"b","map":{"\udc00":"v"}}',
        r'{"event_id":"c","map":{"k":"\udc00"}}',
        r'{"event_id":"d","n\ud800me":"x"}',
        r'{"event_id":"e","in":{"x":["😀","\ud83d\ude00"]},"map":{"k":"v"}}',
    )

    def test_lone_surrogates_in_keys_and_nested_values(self, spark: SparkSession, write: Write) -> None:
        path = write("e.jsonl", "\n".join(self._NESTED).encode())
        for schema in ("event_id string, `in` struct<x: array<string>>, map map<string, string>", None):
            frame = read_events(spark, [path], schema=schema)
            found = frame.select("event_id", CORRUPT_RECORD).collect()
            assert [row[0] for row in found] == [None, None, None, None, "e"]
            assert "n?me" not in frame.columns
            assert found[0][-1].startswith(
                "lone surrogate (half of a character, such as \\ud800) in column in of file:/"
            )
            if schema:
                assert " in column map of file:/" in found[1][-1]
                assert " in column map of file:/" in found[2][-1]
            assert " in the line of file:/" in found[3][-1]

    @pytest.mark.parametrize("encoding", [None, "utf-16", "latin1"])
    def test_documents_with_lone_surrogates_are_rejected(
        self, spark: SparkSession, write: Write, encoding: str | None, tmp_path: Path
    ) -> None:
        good = '[{"event_id":"é?"},\n{"event_id":"\\ud83d\\ude00"}]'
        write("in/a.json", good.encode(encoding or "utf-8"))
        write("in/b.json", r'[{"event_id":"x"},{"event_id":"a\ud800"}]'.encode(encoding or "utf-8"))
        write("in/c.json", r'{"event_id":"y","n\udc00":"x"}'.encode(encoding or "utf-8"))
        bad = {"b.json": "lone surrogate", "c.json": "lone surrogate"}
        if encoding != "latin1":  # latin1 has no bytes for it; the others have, though they should not
            write("in/d.json", '[{"event_id":"b\ud800"}]'.encode("utf-16", "surrogatepass"))
            bad["d.json"] = "not UTF-16" if encoding else "not UTF-8"
        for schema in ("event_id string", None):
            frame = read_events(
                spark, [str(tmp_path / "in")], schema=schema, encoding=encoding, options={"multiLine": "true"}
            )
            found = frame.select("event_id", CORRUPT_RECORD).collect()
            assert sorted(row[0] for row in found if row[-1] is None) == ["é?", "😀"]
            for name, said in bad.items():
                assert any(row[-1] and row[-1].startswith(said) and f"/in/{name} (" in row[-1] for row in found)


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        *((name, "é 🎉".encode("utf-16-le")) for name in ("UTF-16LE", "utf-16-le")),
        *((name, "é 🎉".encode("utf-16-be")) for name in ("UTF-16BE", "utf_16_be")),
        ("utf-8-sig", "é 🎉".encode()),
        ("ISO-8859-1", "é \x85¤".encode("latin1")),
        ("windows-1252", "é €".encode("cp1252")),
        ("mac_roman", "é ∞".encode("mac_roman")),
        ("cp932", "①~\uff5e".encode("cp932")),
    ],
)
def test_names_that_python_and_java_spell_differently(read: Read, encoding: str, data: bytes) -> None:
    bare = encoding.removesuffix("-sig")
    assert rows(read("e.csv", "event_id\n".encode(encoding) + data + "\n".encode(bare), encoding=encoding)) == [
        (data.decode(bare), None)
    ]


def test_encodings_that_cannot_be_read(spark: SparkSession, write: Write) -> None:
    path = write("e.csv", "event_id\na\n".encode("cp500"))
    for format_ in ("csv", "json"):
        with pytest.raises(SourceError, match="in IBM500, ASCII has other bytes; convert the files to UTF-8 first"):
            read_events(spark, [path], encoding="cp500", format=format_)
    path = write("e.json", b'{"event_id":"a"}')
    with pytest.raises(SourceError, match="JSON in UTF-16 cannot be read line by line; convert"):
        read_events(spark, [path], schema=FIELDS, encoding="utf-16")
    with pytest.raises(SourceError, match=r"with multiLine, JSON can be in UTF-8, UTF-16, .* not in windows-1252"):
        read_events(spark, [path], encoding="cp1252", options={"multiLine": "true"})


@pytest.mark.parametrize("encoding", ["klingon", "rot13", "base64", "", "idna", "iso2022_jp", "hz", "utf-7"])
def test_encodings_that_are_none(read: Read, encoding: str) -> None:
    with pytest.raises(SourceError, match=r"encoding .* is unknown; use one such as latin1"):
        read("e.csv", b"event_id\na\n", encoding=encoding)


def test_the_option_of_sparks_reader_means_the_same(spark: SparkSession, write: Write) -> None:
    path = write("e.csv", "event_id\né\n".encode("latin1"))
    for name in ("encoding", "charset", "ENCODING"):
        assert rows(read_events(spark, [path], options={name: "latin1"})) == [("é", None)]


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_bytes_of_any_source_that_are_not_utf8(
    spark: SparkSession, books: Books, schema_url: str, tmp_path: Path, writer: str
) -> None:
    """Parquet holds such texts as they are; JDBC would replace them, and COPY fail with all the others."""
    fine = b"fine"
    made = spark.createDataFrame(
        [
            (b"a", *[fine] * 4),
            (FFFD.encode(), FFFD.encode(), *[fine] * 3),
            (b"M\xfc-1", *[fine] * 4),
            (b"M\xf6-1", *[fine] * 4),
            *((f"z{bad}".encode(), *(b"\xff" if bad == column else fine for column in range(4))) for bad in range(4)),
        ],
        "id binary, text binary, word binary, nested binary, thing binary",
    )
    path = str(tmp_path / "archive.parquet")
    id_, text, word, nested, thing = (sql.col(name).cast("string") for name in made.columns)
    made.select(
        id_.alias("event_id"),
        text.alias("name"),
        sql.array(word).alias("words"),
        sql.struct(sql.array(nested).alias("a")).alias("nested"),
        sql.create_map(thing, thing).alias("things"),
    ).write.parquet(path)
    report = load(read_events(spark, [path]), schema_url, writer, apply=KEEP)
    assert (report.rejected, report.applied) == (6, 2)
    assert applied(books) == sorted(["a|fine", f"{FFFD}|{FFFD}"])
    said = "\n".join(cause.cause for cause in report.rejected_causes)
    for place in ("the message id", "column name", "column words", "column nested", "column things"):
        assert f"not UTF-8 in {place}" in said
    assert all("archive.parquet" in one for one in report.rejected_sample)
