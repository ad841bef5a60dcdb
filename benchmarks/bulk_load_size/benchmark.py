"""The benchmark of large bulk loads: time for a million rows, and memory, must not grow with the number of rows."""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.bulk_load.benchmark import APPLY
from benchmarks.bulk_load_size.events import SizedEvents
from benchmarks.bulk_load_size.processes import (
    DISK,
    DRIVER,
    JVM,
    TOGETHER,
    WORKERS,
    Samples,
    measured,
    server_cpu_seconds,
)
from benchmarks.shared.database import SCHEMA, SUBSCRIBER, conninfo
from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run

MILLION = 1_000_000
KINDS = (DRIVER, JVM, WORKERS, TOGETHER, DISK)
DATABASE, FIRST, LAST, PROCESSOR = "database", "first million", "last million", "processor time"

DESCRIPTION = """\
Load files of several sizes by `txbox bulk-load`, each in a process of its own, with Spark's
memory as it is by default. A fifth of the ids are in the inbox before, a tenth of the rows
repeat another one. Seconds for a million rows, Spark's start not counted; the peak of each
kind of process, sampled four times a second; how long the load took for its first and its last
million rows, by its ledger. The accounts must add up; otherwise nothing is reported.
Linux only.
"""


class SizedLoads:
    """Loads of each size; the files are made when they are first asked for."""

    def __init__(self, run: Run) -> None:
        """Prepare; nothing is started."""
        self.run = run

    @cached_property
    def folder(self) -> Path:
        """For the files."""
        return Path(self.run.stack.enter_context(tempfile.TemporaryDirectory(prefix="txbox-size-")))

    @cached_property
    def events(self) -> SizedEvents:
        """The files."""
        options = self.run.options
        return SizedEvents.make(self.folder, options["rows"], options["row_bytes"])

    def load(self, writer: str, rows: int) -> Mapping[str, Sample]:
        """Load so many rows; return how long a million took, and the peaks of memory."""
        database, key = self.run.database, name(writer, rows)
        self.events.reset(database, rows)
        began, server = time.perf_counter(), server_cpu_seconds(database.backend)
        report, samples = self._run(writer, [str(file.path) for file in self.events.of(rows)])
        wall = time.perf_counter() - began
        server_after = server_cpu_seconds(database.backend)
        self.events.check(database, rows, key)
        if report["read"] != rows:
            raise WrongResult(f"{key}: {report['read']:,} rows were read")
        seconds: dict[str, float] = report["seconds"]
        details = {
            **seconds,
            "wall": wall,
            "chunks": report["chunks"],
            **self._pace(report["run_id"]),
        }
        size = database.number("SELECT pg_database_size(current_database())") / 2**20
        found = {key: Sample(sum(seconds.values()) * MILLION / rows, details)}
        found |= {part(writer, rows, kind): Sample(samples.peaks[kind]) for kind in KINDS if samples.peaks.get(kind)}
        found[part(writer, rows, DATABASE)] = Sample(size)
        if server is not None and server_after is not None:
            parts = {"spark": samples.cpu_seconds * MILLION / rows, "server": (server_after - server) * MILLION / rows}
            found[part(writer, rows, PROCESSOR)] = Sample(sum(parts.values()), parts)
        found |= {part(writer, rows, one): Sample(details[one]) for one in (FIRST, LAST) if one in details}
        return found

    def _run(self, writer: str, paths: Sequence[str]) -> tuple[dict[str, Any], Samples]:
        """Run the command; return its report, and what was seen of its processes."""
        names = ("apply.sql", "report.json", "errors.txt", "local")
        effect, output, errors, local = (self.folder / one for one in names)
        effect.write_text(APPLY)
        command = [sys.executable, "-m", "txbox_cli", "bulk-load", *paths, "--subscriber", SUBSCRIBER]
        command += ["--message-id", "event_id", "--apply", str(effect), "--url", self.run.url, "--schema", SCHEMA]
        command += ["--writer", writer, "--master", "local[2]", "--json"]
        with output.open("w") as stdout, errors.open("w") as stderr:
            status, samples = measured(command, local, stdout, stderr)
        if status:
            raise WrongResult(f"txbox bulk-load has ended with status {status}: {errors.read_text()}")
        report: dict[str, Any] = json.loads(output.read_text())
        return report, samples

    def _pace(self, run_id: str) -> dict[str, float]:
        """Return the seconds of the merge for the first and for the last million rows; none if there are fewer than 2.

        A transaction's first chunk has the counts of all its chunks, and the time at which it began.
        """
        query = f"""
            SELECT extract(epoch FROM merged_at)::float8, sum(rows_read) FROM {SCHEMA}.bulk_load_chunk
            WHERE run_id = %s GROUP BY merged_at HAVING sum(rows_read) > 0
            UNION ALL SELECT extract(epoch FROM finished_at)::float8, 0 FROM {SCHEMA}.bulk_load WHERE run_id = %s
            ORDER BY 1"""
        with psycopg.connect(conninfo(self.run.url)) as connection:
            begun = connection.execute(query.encode(), (run_id, run_id)).fetchall()
        return pace([(at, int(rows)) for at, rows in begun])


def pace(begun: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Return the seconds for the first and the last million rows, of the times and the rows of transactions.

    The last of them is the end of the load.
    """
    if sum(rows for _, rows in begun) < 2 * MILLION:
        return {}
    pieces = [(after[0] - at, rows) for (at, rows), after in pairwise(begun)]
    return {FIRST: _seconds(pieces), LAST: _seconds(pieces[::-1])}


def _seconds(pieces: Sequence[tuple[float, int]]) -> float:
    """Return how long a million rows took, from the first of these pieces on."""
    seconds = merged = 0.0
    for taken, rows in pieces:
        share = min(1.0, (MILLION - merged) / rows)
        seconds += share * taken
        merged += share * rows
        if share < 1:
            break
    return seconds


def name(writer: str, rows: int) -> str:
    """Return the key of a load."""
    return f"{writer}, {rows / MILLION:g} M rows"


def part(writer: str, rows: int, kind: str) -> str:
    """Return the key of what is measured beside it."""
    return f"{name(writer, rows)}: {kind}"


def tables(run: Run) -> list[Table]:
    """For each writer, each size against the smallest."""
    this = SizedLoads(run)
    sizes = sorted(run.options["rows"])
    least = sizes[0]
    found = []
    for writer in ("copy", "jdbc"):
        times, memory = [], []
        for rows in sizes:
            to = None if rows == least else name(writer, least)
            times.append(Row(name(writer, rows), partial(this.load, writer, rows), to, unit="s", ours=True))
            to = None if rows == least else part(writer, least, PROCESSOR)
            times.append(Row(part(writer, rows, PROCESSOR), None, to, unit="s", ours=True))
            for one in (FIRST, LAST):
                to = part(writer, rows, FIRST) if one == LAST else None
                times.append(Row(part(writer, rows, one), None, to, unit="s", ours=True))
            for kind in (*KINDS, DATABASE):
                to = None if rows == least else part(writer, least, kind)
                memory.append(Row(part(writer, rows, kind), None, to, unit="MB", ours=True))
        found += [
            Table(f"writer {writer}: seconds for a million rows", times),
            Table(f"writer {writer}: megabytes at the peak", memory, plotted=False),
        ]
    return found


BENCHMARK = Benchmark(
    name="bulk_load_size",
    title="Seconds for a million rows of a bulk load",
    description=DESCRIPTION,
    options={
        "rounds": Option("how often each is measured", 1, 1),
        "rows": Option("of the loads", (1_000_000, 5_000_000), (1_000_000, 5_000_000, 10_000_000, 20_000_000)),
        "row_bytes": Option("of a row, about: more than its id and its numbers is a text", 60, 60),
    },
    tables=tables,
    settings={"shared_buffers": "2GB", "max_wal_size": "8GB", "checkpoint_timeout": "15min"},
)
