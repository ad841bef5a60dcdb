"""How a load's events reach Postgres: the port that ``copy_writer`` and ``jdbc_writer`` implement."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from txbox import TxboxError
from txbox_spark.loading.ledger import Run, Totals
from txbox_spark.merging.failed_chunk import FailedChunk

__all__ = ["RowCounts", "StagingLost", "Writer"]


class StagingLost(TxboxError):
    """The staging table is not complete any more: Postgres has recovered from a crash, or the table was dropped."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The rows of a run whose chunks are all merged.

    Attributes:
        expected: rows that the survey has counted, as far as chunks can count them again.
        found: the same rows, as the chunks have counted them.
        rejected: rows that cannot be loaded.
        rejected_sample: some of those.
    """

    expected: int
    found: int
    rejected: int
    rejected_sample: tuple[str, ...]


class Writer(Protocol):
    """Writes the chunks of a run that are not merged yet, and merges them.

    Attributes:
        max_chunks: how many chunks a run may have.
        survey_counts_rejected: the survey must count the rejected rows, since no chunk sees them.
    """

    max_chunks: ClassVar[int]
    survey_counts_rejected: ClassVar[bool]

    def write(self, run: Run) -> list[FailedChunk]:
        """Merge every chunk that is not merged yet; return those that failed.

        Raises:
            BulkLoadFailed: no other attempt would help.
            StagingLost: the next attempt has to begin with a new staging table.
        """

    def row_counts(self, run: Run, totals: Totals) -> RowCounts:
        """Return the rows of a run whose chunks are all merged."""

    def clean_up(self, run: Run) -> None:
        """Remove what a finished run has left in the database."""
