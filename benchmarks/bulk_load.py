"""The bulk load's benchmark: how far Spark and the inbox stay behind raw COPY and the same merge by psql.

The ratios, taken in alternation in one run, mean something; the absolute figures are those of one machine on one day.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import bulk_roads
from bulk_events import BulkEvents, BulkPlace, WrongTotals
from report import Target, print_figures, print_targets, write_json
from rich.console import Console
from rounds import Measurement, Sample, alternate
from sqlalchemy import create_engine

SERIAL = "psql: COPY + best merge"
TWO = "psql: the same in two sessions"
NAIVE = "psql: COPY + naive merge"
HAND = "Spark by hand, row by row"
COPY = "bulk_load, writer copy"
JDBC = "bulk_load, writer jdbc"
AGAIN = "bulk_load, copy, the same file again"

TARGETS = (
    Target("warm, against serial COPY and best merge", COPY, SERIAL, 1.0, at_least=True),
    Target("warm, against two sessions", COPY, TWO, 0.75, at_least=True),
    Target("warm, against the naive merge", COPY, NAIVE, 3.0, at_least=True),
    Target("over JDBC, against serial COPY and best merge", JDBC, SERIAL, 0.85, at_least=True),
    Target("again, against the first time (in rows a second)", AGAIN, COPY, 4.0, at_least=True),
)

DESCRIPTION = """\
Load the same events by several roads into the same inbox, a part of them known, a part twice in the file. Rows a
second, Spark's start not counted. After each road the accounts must add up to the last cent; otherwise nothing is
reported.
"""

SETTINGS = {"shared_buffers": "2GB", "max_wal_size": "8GB", "checkpoint_timeout": "15min"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = _parser().parse_args(arguments)
    console, errors = Console(), Console(stderr=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="txbox-bulk-")))
        url = options.url or _embedded(stack)
        errors.print(f"making {options.rows:,} events", style="dim")
        events = BulkEvents.make(folder, options.rows, options.duplicates, options.known)
        engine = create_engine(url)
        stack.callback(engine.dispose)
        place = BulkPlace(engine, events)
        spark = stack.enter_context(_spark(options.master))
        frame = spark.read.parquet(events.parquet)
        _warm(place, frame, url)
        roads = _roads(options, url, events, frame)

        def told(number: int, measurement: Measurement, sample: Sample) -> None:
            stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in sample.details.items())
            errors.print(
                f"{number}: {measurement.key}: {sample.value:,.0f} rows/s  {stages}", style="dim", markup=False
            )

        try:
            measurements = [_measured(key, road, place) for key, road in roads.items()]
            figures = alternate(measurements, options.rounds, told)
        except WrongTotals as error:
            errors.print(str(error), markup=False)
            return 1
    rows = [(key, None if key == SERIAL else SERIAL) for key in roads]
    print_figures(console, f"{options.rows:,} events", figures, rows)
    print_targets(console, figures, TARGETS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(f"this process took {peak:,.0f} MiB at most")
    kept = {name: value for name, value in vars(options).items() if name not in ("url", "json")}
    write_json(options.json, figures, TARGETS, {**kept, "process_mib": round(peak)}, SETTINGS)
    console.print(f"every figure is in {options.json}")
    return 0


Road = Callable[[], tuple[int, dict[str, float]]]
"""Loads, and returns how many rows it was, with the seconds of its stages."""


def _roads(options: argparse.Namespace, url: str, events: BulkEvents, frame: Any) -> dict[str, Road]:
    psql = _psql()

    def whole(load: Callable[[], object]) -> Road:
        return lambda: (load(), (events.rows, {}))[1]

    def ours(writer: str) -> Road:
        return lambda: (events.rows, dict(bulk_roads.ours(frame, url, writer, options.chunk_rows).seconds))

    def by_hand() -> tuple[int, dict[str, float]]:
        bulk_roads.by_hand(url, frame, options.hand_rows)
        return options.hand_rows, {}

    roads: dict[str, Road] = {
        SERIAL: whole(lambda: bulk_roads.serial(psql, url, events)),
        COPY: ours("copy"),
        AGAIN: ours("copy"),
        TWO: whole(lambda: bulk_roads.two_sessions(psql, url, events)),
        JDBC: ours("jdbc"),
        NAIVE: whole(lambda: bulk_roads.naive(psql, url, events)),
        HAND: by_hand,
    }
    return {key: road for key, road in roads.items() if not options.only or key in (SERIAL, *options.only)}


def _measured(key: str, road: Road, place: BulkPlace) -> Measurement:
    def run() -> Sample:
        if key != AGAIN:
            place.reset()
        started = time.perf_counter()
        rows, stages = road()
        seconds = time.perf_counter() - started
        if key != HAND:
            place.check(key)
        return Sample(rows / seconds, stages)

    return Measurement(key, "rows/s", run)


def _warm(place: BulkPlace, frame: Any, url: str) -> None:
    """Load a part, so that nobody pays for starting Python workers, and for Java as long as it interprets."""
    place.reset()
    for writer in ("copy", "jdbc"):
        bulk_roads.ours(frame.limit(500_000), url, writer, 250_000)


@contextmanager
def _spark(master: str) -> Iterator[Any]:
    from txbox_spark import spark_session

    spark = spark_session("txbox benchmark", master=master, settings={"spark.driver.memory": "3g"})
    try:
        yield spark
    finally:
        spark.stop()


def _embedded(stack: ExitStack) -> str:
    from txbox_local import LocalPostgres

    return stack.enter_context(LocalPostgres(settings=SETTINGS)).url


def _psql() -> Path:
    from txbox_local.postgres.local_postgres import bin_directory

    return bin_directory() / "psql"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bulk_load.py", description=DESCRIPTION, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of the file")
    parser.add_argument("--duplicates", type=float, default=0.10, help="share of rows whose id another row has")
    parser.add_argument("--known", type=float, default=0.20, help="share of ids that are in the inbox before")
    parser.add_argument("--chunk-rows", type=int, default=1_000_000, help="rows in a chunk")
    parser.add_argument("--hand-rows", type=int, default=50_000, help="rows of the road by hand, which is slow")
    parser.add_argument("--rounds", type=int, default=1, help="how often each road is measured")
    parser.add_argument("--master", default="local[2]", help="where Spark runs")
    parser.add_argument(
        "--only", action="append", metavar="ROAD", help="measure this road and the first one; repeatable"
    )
    parser.add_argument("--url", help="a database to measure in, which loses its tables (one made for the run)")
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/bulk_load.json"), help="where every figure goes"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
