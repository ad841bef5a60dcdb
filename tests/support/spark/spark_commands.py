"""What the commands around Spark are asked, and what stands in the place of Spark."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from support.program import Ended
from txbox_spark import BulkLoadReport, JobProgress, LoadPlan, RejectedCause, StatementPlan
from txbox_spark.report import MergePace

Txbox = Callable[..., Ended]

URL = ("--url", "postgresql://u:hunter2@127.0.0.1:1/x")
WHAT = ("events.jsonl", "--subscriber", "billing", "--message-id", "event_id")

REPORT = BulkLoadReport(
    run_id="0123456789ab",
    subscriber_id="billing",
    source="events.jsonl",
    writer="jdbc",
    writer_reason="executor here has no psycopg",
    attempts=2,
    chunks=3,
    read=1_010,
    rejected=0,
    rejected_sample=(),
    duplicate_in_source=10,
    already_processed=400,
    applied=600,
    seconds={"survey": 1.25, "merge": 2.0},
)
DIRTY = replace(
    REPORT,
    rejected=1_001,
    duplicate_in_source=9,
    already_processed=0,
    applied=0,
    rejected_causes=(
        RejectedCause("field delay: not integer", "delay", 1_000, "NA", "{a\x1b}"),
        RejectedCause("no message id", None, 1, None, "{b\x1b}"),
    ),
    rejected_to="table:refused",
    differing=1_200,
    differing_sample=("p-3", "p-9\x1b"),
)
TABLE = ("--source", "table:archive.purchases")

PACE = MergePace(rows_per_second=12_345.6, chunks_per_minute=90, seconds_left=185)

PLAN = LoadPlan(
    subscriber_id="billing",
    source="events.jsonl",
    writer="copy",
    writer_reason="asked for",
    chunks=7,
    read=1_010,
    rejected=1,
    rejected_causes=(RejectedCause("no message id", None, 1, None, "{\x1b}"),),
    duplicate_in_source=9,
    already_processed=400,
    parked=0,
    expired=0,
    to_apply=600,
    statements=(
        StatementPlan("INSERT INTO purchase\nSELECT id FROM fresh_event", ("Insert on purchase", "  ->  Seq Scan")),
        StatementPlan("LOCK TABLE \x1b", None),
    ),
)


class Spark:
    """Stands where Spark would be started: what the commands hand on is looked at here, Spark is used elsewhere."""

    def __init__(self) -> None:
        self.started: dict[str, Any] = {}
        self.read: dict[str, Any] = {}
        self.given: dict[str, Any] = {}
        self.progress: list[JobProgress] = []
        self.stopped = 0
        self.report = REPORT
        self.raises: BaseException | None = None
        self.drops_an_interrupt = False
