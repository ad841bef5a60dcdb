"""Days go from Postgres into a folder, each row once, whatever ends a run; then Postgres may forget them."""

import shutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Engine

from support.postgres.statements import run
from support.spark.archives import ODD_IDS, PROCESSED, SENT, ago, in_postgres, midnight, same, tell_story
from txbox import DeadLetter, DeadLetters, InvalidConfiguration, Reason
from txbox.maintenance import Maintainer, Retention
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox_spark import SourceError, archive, read_archive, reconcile
from txbox_spark.archive import archiver
from txbox_spark.archive.archive_folder import ArchiveFolder
from txbox_spark.archive.archive_ledger import ArchiveLedger
from txbox_spark.archive.archiver import release
from txbox_spark.runtime.jobs import changed_settings


@pytest.fixture
def story(engine: Engine) -> None:
    """Rows of several days in all tables, and some of today."""
    tell_story(engine)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "an archive")


def test_days_that_are_over_go_into_the_folder_once(
    engine: Engine, spark: SparkSession, schema_url: str, story: None, folder: str
) -> None:
    first = archive(spark, folder, url=schema_url, upto=ago(8, hours=5))
    assert (first.since, first.upto, first.days) == (None, ago(8), 2)
    same(engine, spark, folder, before=ago(8))
    second = archive(spark, folder, url=schema_url)
    assert (second.since, second.upto, second.days) == (ago(8), midnight(), 3)
    assert second.sent == 4 * len(ODD_IDS)
    assert second.processed == 4 * (len(ODD_IDS) + 1)
    third = archive(spark, folder, url=schema_url)
    assert (third.days, third.upto) == (0, midnight())
    same(engine, spark, folder)
    one = read_archive(spark, folder).sent(["queue 1"])
    assert {row[0] for row in one.select("destination").distinct().collect()} == {"queue 1"}


def test_an_inbox_in_generations_wide_bodies_and_settings_of_the_session(
    engine: Engine, spark: SparkSession, schema_url: str, story: None, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox_spark.runtime.jdbc.PARTITION_BYTES", 10_000)
    assert InboxConversion(engine).forward()
    assert Generations(engine).rotate()
    run(engine, "INSERT INTO processed_message (subscriber_id, message_id, processed_at, fingerprint) "
        f"VALUES ('billing', 'late', '{ago(2).isoformat()}', sha256('x'))")  # fmt: skip
    run(engine, "INSERT INTO outbox_sent (message_id, position, destination, headers, body, published_at, sent_at) "
        f"VALUES ('wide', 9000, 'q', '{{}}', repeat('x', 1 << 20)::bytea, now(), '{ago(2).isoformat()}')")  # fmt: skip
    held, read = [], archiver._Rows._read
    monkeypatch.setattr(archiver._Rows, "_read", lambda self, *given: held.append(given[-1]) or read(self, *given))
    theirs = {
        "spark.sql.session.timeZone": "America/New_York",
        "spark.sql.timestampType": "TIMESTAMP_NTZ",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MILLIS",
        "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
        "spark.sql.ansi.enabled": "false",
        "spark.sql.adaptive.enabled": "false",
    }
    with changed_settings(spark, theirs):
        archive(spark, folder, url=schema_url)
        assert held[0] == 7  # rows of a megabyte that a task has at a time; 500 of them would end the JVM
        assert ("sent_at", "timestamp") in read_archive(spark, folder).sent().dtypes
    same(engine, spark, folder)


MOMENTS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    lambda patch: patch.setattr(ArchiveLedger, "propose", _dies),
    lambda patch: patch.setattr(ArchiveFolder, "put_in_place", _dies),
    lambda patch: _dies_while_it_copies(patch),
    lambda patch: _dies_at_call(patch, ArchiveFolder, "_move", 3),  # between two days
    lambda patch: patch.setattr(ArchiveFolder, "_write", _dies),  # the file of days
    lambda patch: patch.setattr(ArchiveLedger, "finish", _dies),
)
"""Where a run ends, in its order: each next one finds what the one before has left, and gets a step further."""


class Killed(BaseException):
    pass


def _dies(*_: object, **__: object) -> None:
    raise Killed


def _dies_at_call(patch: pytest.MonkeyPatch, owner: type, name: str, call: int) -> None:
    real, calls = getattr(owner, name), [0]

    def counted(*arguments: object, **named: object) -> object:
        calls[0] += 1
        if calls[0] == call:
            raise Killed
        return real(*arguments, **named)

    patch.setattr(owner, name, counted)


def _dies_while_it_copies(patch: pytest.MonkeyPatch) -> None:
    """As on S3, where a move copies one file after the other."""
    real = ArchiveFolder._move

    def one_file(self: ArchiveFolder, source: str, target: str, files: Mapping[str, int]) -> None:
        if len(files) < 2:
            real(self, source, target, files)
            return
        there = Path(target.removeprefix("file:"))
        there.mkdir(parents=True)
        shutil.copy(Path(source.removeprefix("file:"), next(iter(files))), there)
        raise Killed

    patch.setattr(ArchiveFolder, "_move", one_file)


def test_a_run_that_ends_anywhere_is_finished_by_the_next(
    engine: Engine, spark: SparkSession, schema_url: str, story: None, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archiver, "SENT_ROWS", 1)  # so that a day has more than one file
    archive(spark, folder, url=schema_url, upto=ago(9))
    for dies in MOMENTS:
        with pytest.MonkeyPatch.context() as patch:
            dies(patch)
            with pytest.raises(Killed):
                archive(spark, folder, url=schema_url, upto=ago(3))
        with engine.connect() as connection:
            upto = connection.exec_driver_sql("SELECT archived_upto FROM archive").scalar_one()
        assert upto == ago(9), "nothing more may be forgotten"
    again = archive(spark, folder, url=schema_url)
    assert (again.since, again.finished_earlier) == (ago(3), True)
    same(engine, spark, folder)
    assert len(ArchiveFolder(spark, folder).runs()) == 1, "of the one that has proposed nothing"


def test_of_two_runs_at_once_one_adds_the_days(
    engine: Engine, spark: SparkSession, schema_url: str, story: None, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = ArchiveLedger.propose

    def overtaken(self: ArchiveLedger, *arguments: Any) -> bool:
        monkeypatch.setattr(ArchiveLedger, "propose", propose)
        archive(spark, folder, url=schema_url)
        return self.propose(*arguments)

    monkeypatch.setattr(ArchiveLedger, "propose", overtaken)
    with pytest.raises(InvalidConfiguration, match="another run"):
        archive(spark, folder, url=schema_url)
    same(engine, spark, folder)


def test_of_two_databases_that_begin_one_folder_one_gives_way_and_holds_nothing_back(
    engine: Engine, spark: SparkSession, schema_url: str, story: None, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ArchiveFolder.write_identity
    monkeypatch.setattr(ArchiveFolder, "write_identity", lambda self, _: write(self, "theirs"))
    with pytest.raises(InvalidConfiguration, match="another database has begun"):
        archive(spark, folder, url=schema_url)
    assert not ArchiveFolder(spark, folder).runs()
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM archive").scalar_one() == 0


def test_a_transaction_that_is_open_holds_its_day_back(
    engine: Engine, spark: SparkSession, schema_url: str, story: None, folder: str
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO processed_message (subscriber_id, message_id) VALUES ('a', 'open')")
        # A role that may not see when another's transactions began waits for all of them.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ArchiveLedger, "cutoff", lambda *_: datetime.now(UTC) + timedelta(days=1))
            with pytest.raises(InvalidConfiguration, match=r"still open.*: server process \d+"):
                archive(spark, folder, url=schema_url, wait_seconds=0.1)
        archive(spark, folder, url=schema_url, wait_seconds=0.1)  # it began today, and so its rows are of today
    same(engine, spark, folder)


def test_postgres_forgets_what_the_archive_has_and_nothing_else(
    engine: Engine, spark: SparkSession, schema_url: str, story: None, folder: str
) -> None:
    parked = DeadLetters(engine)
    for name in ("sent again", "waits", "given up"):
        number = parked.park(DeadLetter("billing 0", name, Reason.FAILED, "no", 3, "queue", b"{}"))
        run(engine, f"UPDATE processed_message SET processed_at = '{ago(9).isoformat()}' WHERE message_id = '{name}'")
    archive(spark, folder, url=schema_url, upto=ago(8))
    parked.discard(number or 0, note="never")
    run(engine, "UPDATE dead_letter SET redriven_at = now() WHERE message_id = 'sent again'")
    run(engine, "DELETE FROM processed_message WHERE message_id = 'sent again'")
    run(engine, f"UPDATE dead_letter SET discarded_at = '{ago(8).isoformat()}' WHERE discarded_at IS NOT NULL")
    hours = timedelta(hours=2)
    retention = Retention(inbox={"*": hours}, leases=hours, sent=timedelta(seconds=1), letters=hours)
    forget = Maintainer(engine, retention, force=True).run_once
    assert not forget().failed
    with engine.connect() as connection:
        for statement in (SENT, PROCESSED):
            kept = in_postgres(engine, statement, midnight())
            assert {row[-1] for row in kept} >= {str(ago(days).date()) for days in (8, 3, 1)}
        sent = connection.exec_driver_sql("SELECT min(sent_at) FROM outbox_sent").scalar_one()
        assert sent == ago(8)
        left = connection.exec_driver_sql(
            "SELECT array_agg(message_id) FROM processed_message WHERE processed_at < %s", (ago(9, hours=23),)
        ).scalar_one()
        assert left == ["waits"]
    archive(spark, folder, url=schema_url)
    assert not forget().failed
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM outbox_sent").scalar_one() == len(ODD_IDS)
    found = read_archive(spark, folder)
    assert found.upto == midnight()
    compared = reconcile(
        found.sent(), url=schema_url, subscriber_id="billing 0", message_id="message_id", forgotten=folder
    )
    theirs = [one for index, one in enumerate(ODD_IDS) if index % 2 == 0]
    assert compared.archived == 7 * len(ODD_IDS)
    assert compared.never_processed == 7 * (len(ODD_IDS) - len(theirs))
    assert compared.processed == 8 * len(theirs)  # with those of today
    run(engine, "INSERT INTO outbox_sent (message_id, position, destination, headers, body, published_at) "
        "VALUES ('waits', 9001, 'q', '{}', '', now()), ('given up', 9002, 'q', '{}', '', now())")  # fmt: skip
    names = [("sent again",), ("waits",), ("given up",), ("lost",)]
    letters = spark.createDataFrame(names, "message_id string")
    judged = reconcile(letters, url=schema_url, subscriber_id="billing 0", message_id="message_id", forgotten=folder)
    assert (judged.never_processed, judged.parked, judged.discarded) == (4, 1, 1)
    assert release(folder, url=schema_url)
    assert not release(folder, url=schema_url)
    Path(folder).with_name("a file").touch()
    refused = [(folder, InvalidConfiguration, "released"), (f"{folder}[1]", InvalidConfiguration, "pattern"),
               (str(Path(folder).with_name("a file") / "lake"), SourceError, "cannot")]  # fmt: skip
    for one, error, message in refused:
        with pytest.raises(error, match=message):
            archive(spark, one, url=schema_url)
    with engine.connect() as connection:  # what is refused holds nothing back
        assert connection.exec_driver_sql("SELECT count(*) FROM archive").scalar_one() == 0


def test_a_folder_that_is_not_this_archive_is_refused(
    engine: Engine, spark: SparkSession, schema_url: str, story: None, folder: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match="no archive"):
        read_archive(spark, folder)
    archive(spark, folder, url=schema_url, upto=ago(9))
    archive(spark, folder, url=schema_url)
    stretches = Path(folder, "_txbox", "stretches")
    for checksum in stretches.glob(".*.crc"):
        checksum.unlink()
    first, last = sorted(stretches.glob("*.json"))
    text = last.read_text()
    last.unlink()
    with pytest.raises(InvalidConfiguration, match=f"up to {ago(9).date()}, and the database says days up to"):
        archive(spark, folder, url=schema_url)
    last.write_text(text)
    first_text = first.read_text()
    first.write_text(first_text.replace(str(ago(9).date()), str(ago(10).date())))
    with pytest.raises(SourceError, match="lacks the days"):
        read_archive(spark, folder)
    first.write_text("{")
    with pytest.raises(SourceError, match="no JSON"):
        read_archive(spark, folder)
    first.write_text(first_text)
    run(engine, "UPDATE archive SET archive_id = 'other'")
    with pytest.raises(InvalidConfiguration, match="another database"):
        archive(spark, folder, url=schema_url)
