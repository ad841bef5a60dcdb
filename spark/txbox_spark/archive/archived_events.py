"""What an archive has, as DataFrames: of the days that were put in place, and no others."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from txbox_spark.archive.archive_folder import DAY, PROCESSED, SENT, ArchiveFolder, Stretch
from txbox_spark.reading.errors import SourceError, explained
from txbox_spark.runtime.lazy_imports import DataFrame, SparkSession, sql
from txbox_spark.runtime.session import refuse_connect

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
    stretches: tuple[Stretch, ...]
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
