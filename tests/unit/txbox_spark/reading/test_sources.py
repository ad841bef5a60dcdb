"""Formats by names of files, and exact numbers for JSON: no Spark session is needed to decide these."""

import pytest

from txbox_spark.reading.errors import SourceError
from txbox_spark.reading.sources import _format


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("events.parquet", "parquet"),
        ("events.snappy.parquet", "parquet"),
        ("events.jsonl", "json"),
        ("events.json", "json"),
        ("events.ndjson.zst", "json"),
        ("EVENTS.JSON.GZ", "json"),
        ("events.csv.bz2", "csv"),
        ("s3a://bucket/events.csv", "csv"),
        ("s3a://bucket/day=1/*.jsonl.gz", "json"),
        ("events.parquet/", "parquet"),
    ],
)
def test_the_format_is_guessed_by_the_ending(path: str, expected: str) -> None:
    assert _format(None, [path], ["file:///part-0"]) == expected


def test_a_folder_has_the_format_of_its_files() -> None:
    assert _format(None, ["archive"], ["file:///archive/a.csv", "file:///archive/b.csv.gz"]) == "csv"


def test_a_given_format_counts_more_than_names() -> None:
    assert _format("json", ["events.csv"], ["file:///events.csv"]) == "json"


@pytest.mark.parametrize(
    ("wanted", "paths", "files", "why"),
    [
        ("text", ["a.csv"], ["a.csv"], "format 'text' is unknown; use one of parquet, json, csv"),
        ("avro", ["a.csv"], ["a.csv"], "events are read from parquet, json, csv, and not from avro; in Python, "),
        (None, ["archive"], ["file:///archive/part-0"], "the name of file:///archive/part-0 does not tell its format"),
        (None, ["a.csv", "b.json"], ["a.csv", "b.json"], r"several formats: a\.csv \(csv\), b\.json \(json\)"),
        (None, ["archive"], ["x/a.csv", "x/b.parquet"], "several formats"),
    ],
)
def test_a_format_that_is_not_clear_is_refused(
    wanted: str | None, paths: list[str], files: list[str], why: str
) -> None:
    with pytest.raises(SourceError, match=why):
        _format(wanted, paths, files)
