"""The bulk load's benchmark: how far Spark and the inbox stay behind raw COPY and the same merge by psql."""

import subprocess
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from benchmarks.bulk_load.events import BulkEvents
from benchmarks.bulk_load.tiny_load import BEYOND, LOAD, START, tiny_load
from benchmarks.bulk_load.worker_beside import EFFECT, MESSAGES, worker_beside
from benchmarks.shared.database import SCHEMA, SUBSCRIBER, conninfo
from benchmarks.shared.measurements import Row, Sample, Table
from benchmarks.shared.program import Benchmark, Option, Run
from txbox_spark import bulk_load, spark_session

SERIAL = "psql: COPY + best merge"
TWO = "psql: the same, two sessions"
NAIVE = "psql: COPY + naive merge"
COPY = "bulk_load, writer copy"
JDBC = "bulk_load, writer jdbc"
AGAIN = "bulk_load, same file again"
FEW = "bulk_load, 97 of its ids new"

ALONE = "worker alone, p99"
BESIDE = {"new": "beside, new ids", "overlapping": "beside, ids of the load"}
ALONE_SECONDS = 8.0

WARM_UP_ROWS = 500_000
"""Loaded before anything is measured: starting Python workers, and Java as long as it interprets."""

COLUMNS = 'event_id text COLLATE "C", account_id bigint, cents bigint, occurred_at timestamptz'

APPLY = f"""
UPDATE {SCHEMA}.account SET balance = account.balance + new.cents
FROM (SELECT account_id, sum(cents) AS cents FROM fresh_event GROUP BY account_id) AS new
WHERE account.account_id = new.account_id"""

BEST_MERGE = f"""
CREATE TEMPORARY TABLE fresh_event ON COMMIT DROP AS
SELECT DISTINCT ON (event_id) staging.* FROM staging
WHERE NOT EXISTS (
  SELECT FROM {SCHEMA}.processed_message AS processed
  WHERE processed.subscriber_id = '{SUBSCRIBER}' AND processed.message_id = staging.event_id
)
ORDER BY event_id;
INSERT INTO {SCHEMA}.processed_message (subscriber_id, message_id) SELECT '{SUBSCRIBER}', event_id FROM fresh_event;
{APPLY};"""

MERGE_IN_TURN = BEST_MERGE.replace(APPLY, f"\nSELECT pg_advisory_xact_lock(1);{APPLY}")
"""For two sessions: their updates of the same accounts take turns, as those of our chunks do; else they deadlock."""

NAIVE_MERGE = f"""
WITH first AS (
  INSERT INTO {SCHEMA}.processed_message (subscriber_id, message_id) SELECT '{SUBSCRIBER}', event_id FROM staging
  ON CONFLICT DO NOTHING RETURNING message_id
), fresh_event AS (
  SELECT DISTINCT ON (event_id) staging.* FROM staging JOIN first ON first.message_id = staging.event_id
)
{APPLY.strip()};"""

SETTINGS = f"SET work_mem = '128MB'; SET search_path = {SCHEMA};"
"""The memory is what our own chunks have."""

DESCRIPTION = """\
Load the same events in several ways into the same inbox: a fifth of the ids are in it
already, a tenth of the rows repeat another one. Rows a second, Spark's start not counted.
Then what a worker's messages wait while a file is loaded beside it, for the same accounts.
Last, how much longer a load of a few rows takes than to start Spark and to stop it.
After each load the accounts must add up; otherwise nothing is reported.
"""


class Loading:
    """The ways to load; the events and Spark are made when they are first asked for."""

    def __init__(self, run: Run) -> None:
        """Prepare; nothing is started."""
        self.run = run
        self._last: str | None = None

    @cached_property
    def events(self) -> BulkEvents:
        """The files."""
        folder = self.run.stack.enter_context(tempfile.TemporaryDirectory(prefix="txbox-bulk-"))
        return BulkEvents.make(Path(folder), self.run.options["rows"])

    @cached_property
    def frame(self) -> Any:
        """The events in Spark, which has loaded a part of them before."""
        settings = {"spark.driver.memory": "3g"}
        spark = spark_session("txbox benchmark", master="local[2]", settings=settings)
        self.run.stack.callback(spark.stop)
        frame = spark.read.parquet(self.events.file("events.parquet"))
        for writer in ("copy", "jdbc"):
            self.events.reset(self.run.database)
            self._load(frame.limit(WARM_UP_ROWS), writer)
        return frame

    def by_psql(self, key: str, merge: str) -> Sample:
        """Raw COPY of the file into an unlogged staging table, and a merge, in one session."""
        staging = f"{SETTINGS} CREATE UNLOGGED TABLE staging ({COLUMNS});"
        return self._measured(key, lambda: self._psql(staging, "events.csv", f"BEGIN; {merge} COMMIT;"))

    def by_two_sessions(self) -> Sample:
        """The best merge in two sessions at once, each with a half of the file, by id: the limit on two processors."""
        staging = f"{SETTINGS} BEGIN; CREATE TEMPORARY TABLE staging ({COLUMNS}) ON COMMIT DROP;"

        def load() -> None:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda half: self._psql(staging, half, f"{MERGE_IN_TURN} COMMIT;"), HALVES))

        return self._measured(TWO, load)

    def by_spark(self, key: str, writer: str) -> Sample:
        """Our bulk load."""
        frame, stages = self.frame, {}
        sample = self._measured(key, lambda: stages.update(self._load(frame, writer)))
        return Sample(sample.value, stages)

    def worker_alone(self) -> Sample:
        """A worker at a steady rate, and nothing beside it but Spark, which does nothing."""
        assert self.frame is not None
        self._last = None
        self.events.reset(self.run.database)
        with worker_beside(self.run.url, self.events.messages(MESSAGES, overlapping=False)) as found:
            time.sleep(ALONE_SECONDS)
        return Sample(found[0].p99)

    def beside(self, ids: str) -> Mapping[str, Sample]:
        """The same while a file is loaded: the same accounts, and ids of the file or others."""
        frame, overlapping = self.frame, ids == "overlapping"
        self._last = None
        self.events.reset(self.run.database)
        with worker_beside(self.run.url, self.events.messages(MESSAGES, overlapping=overlapping)) as found:
            self._load(frame, "copy", EFFECT)
        self.events.check(self.run.database, BESIDE[ids], 0 if overlapping else found[0].sent)
        return {f"{BESIDE[ids]}, p99": Sample(found[0].p99), f"{BESIDE[ids]}, longest": Sample(found[0].longest)}

    def tiny(self) -> Mapping[str, Sample]:
        """A load of a few rows, and Spark's start alone."""
        self._last = None
        with tempfile.TemporaryDirectory(prefix="txbox-tiny-") as folder:
            return tiny_load(Path(folder), self.run.database, APPLY)

    def _load(self, frame: Any, writer: str, apply: str = APPLY) -> Mapping[str, float]:
        report = bulk_load(
            frame,
            url=self.run.url,
            schema=SCHEMA,
            subscriber_id=SUBSCRIBER,
            message_id="event_id",
            apply=apply,
            writer=writer,
            chunk_rows=1_000_000,
        )
        return dict(report.seconds)

    def _measured(self, key: str, load: Any, *, is_merged: bool = True) -> Sample:
        after = {AGAIN: (COPY, FEW), FEW: (COPY, AGAIN)}.get(key)
        if after is None or self._last not in after:
            self.events.reset(self.run.database)
            if after is not None:
                load()  # --only has left out the first time
        if key == FEW:
            self.events.forget(self.run.database, 97)
        self._last = key
        began = time.perf_counter()
        load()
        seconds = time.perf_counter() - began
        if is_merged:
            self.events.check(self.run.database, key)
        return Sample(self.events.rows / seconds)

    def _psql(self, before: str, file: str, after: str) -> None:
        """Copy a file by psql, whose own commands end with their line."""
        script = f"{before}\n\\copy staging from '{self.events.file(file)}' csv\n{after}\n"
        program = self.run.program("psql")
        command = [program, "--no-psqlrc", "--quiet", "--set", "ON_ERROR_STOP=1", conninfo(self.run.url)]
        subprocess.run(command, input=script, text=True, check=True, stdout=subprocess.DEVNULL)


HALVES = ("half-0.csv", "half-1.csv")


def tables(run: Run) -> list[Table]:
    """Ours against each limit; and a second time against the first."""
    this = Loading(run)

    def by_spark(key: str, writer: str, to: str, least: float) -> Row:
        return Row(key, partial(this.by_spark, key, writer), to, least, ours=True)

    rows = [
        Row(SERIAL, partial(this.by_psql, SERIAL, BEST_MERGE)),
        by_spark(COPY, "copy", SERIAL, 1.0),
        by_spark(AGAIN, "copy", COPY, 4.0),
        by_spark(FEW, "copy", COPY, 1 / 0.35),
        Row(TWO, this.by_two_sessions, SERIAL),
        by_spark(JDBC, "jdbc", SERIAL, 0.85),
        Row(NAIVE, partial(this.by_psql, NAIVE, NAIVE_MERGE), SERIAL),
    ]
    waits = [Row(ALONE, this.worker_alone, unit="ms")]
    for ids, key in BESIDE.items():
        waits.append(Row(f"{key}, p99", partial(this.beside, ids), ALONE, at_most=2.0, unit="ms", ours=True))
        waits.append(Row(f"{key}, longest", at_most=1000.0, unit="ms", ours=True))
    tiny = [
        Row(START, this.tiny, unit="s"),
        Row(LOAD, unit="s", ours=True),
        Row(BEYOND, at_most=3.0, unit="s", ours=True),
    ]
    ratios = [Row(COPY, None, TWO, 0.75), Row(COPY, None, NAIVE, 3.0)]
    return [
        Table(f"a file of {run.options['rows']:,} rows", rows),
        Table("against other limits", ratios, plotted=False),
        Table("a worker beside a load", waits, plotted=False),
        Table("a tiny load", tiny, plotted=False),
    ]


BENCHMARK = Benchmark(
    name="bulk_load",
    title="Rows a second of a bulk load",
    description=DESCRIPTION,
    options={
        "rounds": Option("how often each is measured", 1, 3),
        "rows": Option("of the file", 1_000_000, 5_000_000),
    },
    tables=tables,
    settings={"shared_buffers": "2GB", "max_wal_size": "8GB", "checkpoint_timeout": "15min"},
)
