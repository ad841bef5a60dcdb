"""The folder of an archive, on any file system that Spark's Hadoop supports, and the stretches of days in it."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Self

from txbox import InvalidConfiguration
from txbox_spark.reading.errors import SourceError, explained
from txbox_spark.runtime.lazy_imports import DataFrame, SparkSession, sql
from txbox_spark.runtime.session import refuse_connect

SENT = "sent"
PROCESSED = "processed"
KINDS = (SENT, PROCESSED)

DAY = "day"
"""The column, and the part of a path, with the day in UTC, such as 2026-11-20."""

BEGINNING = datetime(1, 1, 1, tzinfo=UTC)
"""Where the first stretch begins: before anything was ever sent."""


@dataclass(frozen=True, slots=True)
class ArchivedDay:
    """One day of one kind: how many rows it has, and the size in bytes of each of its files."""

    rows: int
    files: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ArchiveStretch:
    """Days that were added together; days without rows have no folder.

    Attributes:
        run: the run that wrote it, which is also the name of its staging folder.
        first: the start of its first day; ``BEGINNING`` for the first stretch.
        beyond: the end of its last day.
        days: by kind and day.
    """

    archive_id: str
    run: str
    first: datetime
    beyond: datetime
    days: Mapping[str, Mapping[str, ArchivedDay]]

    def rows(self, kind: str) -> int:
        return sum(day.rows for day in self.days[kind].values())

    @property
    def name(self) -> str:
        """The name of its file: one for each start, so two stretches of an archive cannot share days."""
        return f"{self.first.date().isoformat()}.json"

    def as_json(self) -> str:
        days = {
            kind: {day: {"rows": one.rows, "files": dict(one.files)} for day, one in of_kind.items()}
            for kind, of_kind in self.days.items()
        }
        values = {
            "format": _FORMAT,
            "archive_id": self.archive_id,
            "run": self.run,
            "first": self.first.isoformat(),
            "beyond": self.beyond.isoformat(),
            "days": days,
        }
        return json.dumps(values, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the stretch that ``as_json`` wrote.

        Raises:
            ValueError: the format is missing or of a later version.
        """
        if values.get("format") != _FORMAT:
            raise ValueError(f"format {values.get('format')!r} is not known to this version of txbox")
        days = {
            kind: {day: ArchivedDay(one["rows"], one["files"]) for day, one in values["days"][kind].items()}
            for kind in KINDS
        }
        first, beyond = (datetime.fromisoformat(values[name]) for name in ("first", "beyond"))
        return cls(values["archive_id"], values["run"], first, beyond, days)


_FORMAT = 1


OWN = "_txbox"
"""The folder of our own files; Spark skips names that begin with an underscore."""


class ArchiveFolder:
    """The files of an archive. Each day is moved into place as a whole; then the stretch's file lists it."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        """Resolve ``location`` to a full address. The folder need not exist.

        Raises:
            InvalidConfiguration: Spark would take the name for a pattern.
            SourceError: the file system does not exist.
        """
        if found := _PATTERN.search(location):
            raise InvalidConfiguration(
                f"{location} has a {found[0]}, and Spark would take it for a pattern of folders; give another folder"
            )
        self._jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - pyspark has no other way to a file system
        configuration = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
        with explained(f"cannot reach {location}"):
            self._files: Any = self._path(location).getFileSystem(configuration)
            self.location = str(self._files.makeQualified(self._path(location)).toString())

    def path(self, *names: str) -> str:
        return "/".join([self.location, *names])

    def staged(self, run: str, *names: str) -> str:
        """Return a path below the folder that a run writes to."""
        return self.path(OWN, "staged", run, *names)

    def read_identity(self) -> str | None:
        """Return the id of this archive; None if the folder has none."""
        found = self._read(self.path(OWN, "archive.json"))
        return None if found is None else str(found["archive_id"])

    def write_identity(self, archive_id: str) -> None:
        self._write(self.path(OWN, "archive.json"), json.dumps({"archive_id": archive_id}))

    def stretches(self) -> list[ArchiveStretch]:
        """Return the archive's stretches in order.

        Raises:
            SourceError: a stretch's file cannot be read, or one between others is missing.
        """
        folder = self.path(OWN, "stretches")
        found = []
        for name in filter(lambda name: name.endswith(".json"), self.files(folder)):
            values = self._read(f"{folder}/{name}")
            try:
                found.append(ArchiveStretch.from_json(values or {}))
            except (KeyError, TypeError, ValueError) as error:
                raise SourceError(f"{folder}/{name} is no list of archived days: {error}") from error
        found.sort(key=lambda one: one.first)
        for before, after in pairwise(found):
            if before.beyond != after.first:
                raise SourceError(
                    f"{self.location} lacks the days from {before.beyond.date()} to {after.first.date()}: "
                    f"a file of {folder} is missing, or there is one too many"
                )
        return found

    def put_in_place(self, stretch: ArchiveStretch) -> None:
        """Move the days of a stretch to where readers look, then write the stretch's file; skip what is done already.

        Raises:
            SourceError: the files are not those that the stretch names.
        """
        for kind in KINDS:
            for day, one in stretch.days[kind].items():
                source, target = (f"{place}/{DAY}={day}" for place in (self.staged(stretch.run, kind), self.path(kind)))
                if self.files(target) != one.files:
                    self._move(source, target, one.files)
                if (found := self.files(target)) != one.files:
                    raise SourceError(
                        f"{target} does not have the files that were written for it: {len(found)} in place of "
                        f"{len(one.files)}, or of other sizes. If they were changed by hand, put them back; nothing of "
                        "that day is forgotten in Postgres"
                    )
        self._write(self.path(OWN, "stretches", stretch.name), stretch.as_json())
        self.remove(self.staged(stretch.run))

    def files(self, folder: str) -> Mapping[str, int]:
        """Return the sizes in bytes of the files that Spark reads in a folder; empty if the folder does not exist."""
        path = self._path(folder)
        with explained(f"cannot list {folder}"):
            if not self._files.exists(path):
                return {}
            found = {one.getPath().getName(): int(one.getLen()) for one in self._files.listStatus(path)}
        return {name: size for name, size in sorted(found.items()) if not name.startswith((".", "_"))}

    def runs(self) -> list[str]:
        """Return the runs whose staging folders are still there."""
        return list(self.files(self.path(OWN, "staged")))

    def remove(self, folder: str) -> None:
        with explained(f"cannot remove {folder}"):
            self._files.delete(self._path(folder), True)

    def _move(self, source: str, target: str, files: Mapping[str, int]) -> None:
        """Move a folder, or what is left of it. The caller checks the result.

        On S3, a move copies one file after another. If one was killed, some files are in the target; move the others.
        """
        with explained(f"cannot move {source} to {target}"):
            if not self._files.exists(self._path(source)):
                return
            if not self._files.exists(self._path(target)):
                self._files.mkdirs(self._path(target).getParent())
                self._files.rename(self._path(source), self._path(target))
                return
            left, there = self.files(source), self.files(target)
            for name, size in files.items():
                if left.get(name) == size != there.get(name):
                    self._files.delete(self._path(f"{target}/{name}"), False)
                    self._files.rename(self._path(f"{source}/{name}"), self._path(f"{target}/{name}"))

    def _read(self, path: str) -> Any:
        with explained(f"cannot read {path}"):
            if not self._files.exists(self._path(path)):
                return None
            stream = self._files.open(self._path(path))
            try:
                text = self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8")
            finally:
                stream.close()
        try:
            return json.loads(text)
        except ValueError as error:
            raise SourceError(f"{path} is no JSON: {error}") from error

    def _write(self, path: str, text: str) -> None:
        """Write a file unless it already has this content. Readers see the whole file or none."""
        if self._files.exists(self._path(path)) and self._read(path) == json.loads(text):
            return
        folder, _, name = path.rpartition("/")
        unfinished = self._path(f"{folder}/.{name}.part")
        with explained(f"cannot write {path}"):
            stream = self._files.create(unfinished, True)
            try:
                stream.write(bytearray(text.encode()))
            finally:
                stream.close()
            self._files.delete(self._path(path), False)
            self._files.rename(unfinished, self._path(path))

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(path)


_PATTERN = re.compile(r"[*?\[\]{}\\]")
"""Characters that Hadoop treats as parts of a path pattern."""


SENT_COLUMNS = (
    "message_id string, position bigint, destination string, key string, headers string, body binary, "
    "published_at timestamp_ltz, sent_at timestamp_ltz"
)
PROCESSED_COLUMNS = (
    "subscriber_id string, message_id string, processed_at timestamp_ltz, state string, fingerprint binary"
)


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive as it was when it was opened. Days may be added later; days that it has never change.

    Attributes:
        location: the folder's full address.
        stretches: the days in it, in order.
    """

    location: str
    stretches: tuple[ArchiveStretch, ...]
    _spark: SparkSession

    @property
    def upto(self) -> datetime:
        """The time before which the archive has everything."""
        return self.stretches[-1].beyond

    def sent(self, destinations: Collection[str] | None = None) -> DataFrame:
        """Return the messages sent to all destinations, or to those given, with the column ``day``.

        ``headers`` is JSON. A message that was replayed or sent again has one row for each time.
        """
        frame = self._read(SENT, SENT_COLUMNS)
        return frame if destinations is None else frame.where(sql.col("destination").isin(*destinations))

    def processed(self, subscriber_id: str | None = None) -> DataFrame:
        """Return the inbox rows of all subscribers, or of one, with the column ``day``.

        ``state`` is the state when the day was archived: processed, parked, expired or discarded. A message that was
        parked then and processed later has another row, on the later day.
        """
        frame = self._read(PROCESSED, PROCESSED_COLUMNS)
        return frame if subscriber_id is None else frame.where(sql.col("subscriber_id") == subscriber_id)

    def _read(self, kind: str, columns: str) -> DataFrame:
        root = f"{self.location}/{kind}"
        days = [f"{root}/{DAY}={day}" for one in self.stretches for day in one.days[kind]]
        schema = f"{columns}, {DAY} date"
        with explained(f"cannot read {root}"):
            if not days:
                return self._spark.createDataFrame([], schema)
            # With the schema given, the session's time zone and formats do not matter, and day is a date.
            return self._spark.read.schema(schema).option("basePath", root).parquet(*days)


def read_archive(spark: SparkSession, location: str) -> Archive:
    """Return the archive that ``archive`` wrote to a folder.

    Raises:
        SourceError: the folder has no archive, or it cannot be read.
        InvalidConfiguration: the session is a Spark Connect session.
    """
    refuse_connect(spark, "read_archive", f'read the folders of days: spark.read.parquet("{location}/sent")')
    folder = ArchiveFolder(spark, location)
    stretches = folder.stretches()
    if not stretches:
        raise SourceError(f"there is no archive at {folder.location}: nothing was archived there yet")
    return Archive(folder.location, tuple(stretches), spark)
