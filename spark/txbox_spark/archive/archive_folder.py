"""The folder of an archive, on any file system that Spark's Hadoop knows, and the stretches of days in it."""

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
"""The folders below an archive."""

DAY = "day"
"""The column, and the part of a path, that has the day: in UTC, as 2026-11-20."""

BEGINNING = datetime(1, 1, 1, tzinfo=UTC)
"""Before all that was ever sent: where the first stretch begins."""


@dataclass(frozen=True, slots=True)
class ArchivedDay:
    """A day of one kind: its rows, and its files by name with their sizes in bytes."""

    rows: int
    files: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ArchiveStretch:
    """Days that were added at once; those without rows have no folder.

    Attributes:
        archive_id: of the archive.
        run: which run has written it; names the folder in which it did.
        first: the begin of its first day; ``BEGINNING`` for the first stretch.
        beyond: the end of its last day.
        days: by kind and day.
    """

    archive_id: str
    run: str
    first: datetime
    beyond: datetime
    days: Mapping[str, Mapping[str, ArchivedDay]]

    def rows(self, kind: str) -> int:
        """Return how many rows of a kind it has."""
        return sum(day.rows for day in self.days[kind].values())

    @property
    def name(self) -> str:
        """The name of its file: one for each begin, so no two stretches of an archive can have the same days."""
        return f"{self.first.date().isoformat()}.json"

    def as_json(self) -> str:
        """Return it as JSON."""
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
        """Return what ``as_json`` has written.

        Raises:
            ValueError: it is of a later version, or none.
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
"""Our own files; Spark leaves out what begins so."""


class ArchiveFolder:
    """The files of an archive: days are put in place as a whole, and a stretch's file says that its days are."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        """Name the folder; it need not be there. ``location`` becomes its whole address, whatever was given.

        Raises:
            InvalidConfiguration: Spark would take the name for a pattern.
            SourceError: there is no such file system.
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
        """Return a path below the folder."""
        return "/".join([self.location, *names])

    def staged(self, run: str, *names: str) -> str:
        """Return where a run writes."""
        return self.path(OWN, "staged", run, *names)

    def read_identity(self) -> str | None:
        """Return which archive this is; None if nothing says so."""
        found = self._read(self.path(OWN, "archive.json"))
        return None if found is None else str(found["archive_id"])

    def write_identity(self, archive_id: str) -> None:
        """Say which archive this is."""
        self._write(self.path(OWN, "archive.json"), json.dumps({"archive_id": archive_id}))

    def stretches(self) -> list[ArchiveStretch]:
        """Return what is in the archive, in order.

        Raises:
            SourceError: a file cannot be read, or one of them is missing between others.
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
        """Move the days of a stretch to where they are read, and then say so; what is done already is left out.

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
        """Return the files that Spark reads in a folder, by name with their sizes; none if there is no folder."""
        path = self._path(folder)
        with explained(f"cannot list {folder}"):
            if not self._files.exists(path):
                return {}
            found = {one.getPath().getName(): int(one.getLen()) for one in self._files.listStatus(path)}
        return {name: size for name, size in sorted(found.items()) if not name.startswith((".", "_"))}

    def runs(self) -> list[str]:
        """Return the runs that have left something that was not put in place."""
        return list(self.files(self.path(OWN, "staged")))

    def remove(self, folder: str) -> None:
        """Remove a folder with all that is in it."""
        with explained(f"cannot remove {folder}"):
            self._files.delete(self._path(folder), True)

    def _move(self, source: str, target: str, files: Mapping[str, int]) -> None:
        """Move a folder; that it is gone, or that the other one is there, is for the caller to look at.

        On S3 a move copies one file after the other: of one that was killed, some are there. The others are moved then.
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
        """Write a file, unless it is there as it should be; what reads it meanwhile finds all of it, or none."""
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
"""What Hadoop's patterns of paths are made of."""


SENT_COLUMNS = (
    "message_id string, position bigint, destination string, key string, headers string, body binary, "
    "published_at timestamp_ltz, sent_at timestamp_ltz"
)
PROCESSED_COLUMNS = (
    "subscriber_id string, message_id string, processed_at timestamp_ltz, state string, fingerprint binary"
)


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive as it was when it was opened; it gets more days meanwhile, and never others for those it has.

    Attributes:
        location: the folder.
        stretches: what is in it, in order.
    """

    location: str
    stretches: tuple[ArchiveStretch, ...]
    _spark: SparkSession

    @property
    def upto(self) -> datetime:
        """Up to here, it has everything."""
        return self.stretches[-1].beyond

    def sent(self, destinations: Collection[str] | None = None) -> DataFrame:
        """Return what was sent, to all destinations or some of them, with the column ``day``.

        ``headers`` is JSON. A message that was replayed, or sent again, has a row for each time.
        """
        frame = self._read(SENT, SENT_COLUMNS)
        return frame if destinations is None else frame.where(sql.col("destination").isin(*destinations))

    def processed(self, subscriber_id: str | None = None) -> DataFrame:
        """Return the rows of inboxes, of all subscribers or one, with the column ``day``.

        ``state`` is what it was when the day was archived: processed, parked, expired or discarded. A message that was
        parked then, and processed later, has another row, of that day.
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
            # Text of a user's time zone and format is never read here: the columns are given, and day is a date.
            return self._spark.read.schema(schema).option("basePath", root).parquet(*days)


def read_archive(spark: SparkSession, location: str) -> Archive:
    """Open an archive that ``archive`` has written.

    Raises:
        SourceError: there is none, or it cannot be read.
        InvalidConfiguration: the session is one of Spark Connect.
    """
    refuse_connect(spark, "read_archive", f'read the folders of days: spark.read.parquet("{location}/sent")')
    folder = ArchiveFolder(spark, location)
    stretches = folder.stretches()
    if not stretches:
        raise SourceError(f"there is no archive at {folder.location}: nothing was archived there yet")
    return Archive(folder.location, tuple(stretches), spark)
