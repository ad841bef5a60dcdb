"""What the commands on Spark share: their options, a session, and the display of its progress."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txbox.errors import InvalidConfiguration
from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.options import DatabaseTarget, ReadBy
from txbox_cli.output import plain_console, progress_bars, span
from txbox_cli.signals import ended_in_time, interrupted_plainly, seen_as_interrupt, terminated_as_interrupt

if TYPE_CHECKING:
    from rich.progress import Progress

    from txbox.effects import Upsert
    from txbox_spark import EventSource, JobProgress
    from txbox_spark.options import Apply

PathsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PATH...",
        show_default=False,
        help="Files or folders: Parquet, JSON lines or CSV; s3a://bucket/folder where Spark can.",
    ),
]
SourceOption = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE",
        help="In place of paths: table:CATALOG.NAME, delta:PATH, iceberg:NAME, or jdbc:URL with --read-option "
        "dbtable=NAME or query=SELECT…; jars by --conf spark.jars.packages=….",
    ),
]
SubscriberOption = Annotated[
    str, typer.Option("--subscriber", help="Who processes the events: the name that the live workers' inbox has.")
]
MessageIdOption = Annotated[
    str,
    typer.Option(
        "--message-id",
        metavar="COLUMN",
        help="The column with the message id, or an expression of Spark SQL over them.",
    ),
]
FormatOption = Annotated[
    str | None, typer.Option("--format", help="parquet, json or csv; by default as the file names say.")
]
FieldsOption = Annotated[
    str | None,
    typer.Option(
        "--fields", metavar="DDL", help="Columns and types of JSON or CSV: 'event_id text, amount numeric(12,2)'."
    ),
]
EncodingOption = Annotated[
    str | None,
    typer.Option("--encoding", metavar="NAME", help="Of JSON or CSV that is not UTF-8, such as latin1 or cp1252."),
]
ReadOption = Annotated[
    list[str] | None,
    typer.Option("--read-option", metavar="NAME=VALUE", help="An option of Spark's reader, such as sep=;. Repeatable."),
]
MasterOption = Annotated[
    str | None,
    typer.Option("--master", help="Where Spark runs, such as spark://host:7077; by default on this machine."),
]
ArchiveOption = Annotated[
    str | None,
    typer.Option("--archive", metavar="FOLDER", help="An archive of `txbox archive`: it has what the inbox forgot."),
]
JarOption = Annotated[
    Path | None, typer.Option("--jdbc-jar", metavar="FILE", help="Postgres's JDBC driver, where Spark cannot fetch it.")
]
ConfOption = Annotated[
    list[str] | None,
    typer.Option(
        "--conf", metavar="NAME=VALUE", help="A setting of Spark, such as spark.driver.memory=4g. Repeatable."
    ),
]


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """Where Spark runs, and with what."""

    master: MasterOption = None
    jdbc_jar: JarOption = None
    conf: ConfOption = None


Runtime = Annotated[SparkOptions, ReadBy(SparkOptions)]

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_WITHOUT_C2 = "-XX:TieredStopAtLevel=1"

_BESIDE_REMARK = 34
"""The least number of characters that a bar takes with its stage, count and time."""

SECONDS_PER_LINE = 10.0
"""How often a line about a stage is printed where stderr is no terminal."""


def pairs(option: str, given: Sequence[str] | None) -> dict[str, str]:
    """Return a repeatable option's values by name. Raise ``UsageError`` for one that is not NAME=VALUE."""
    values = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not (name and equals):
            raise UsageError(f"{option} takes NAME=VALUE, not {one!r}")
        values[name] = value
    return values


@dataclass(frozen=True, slots=True)
class Events:
    """Where events are read from: paths of files, or another source."""

    paths: Sequence[str]
    source: str | None
    format: str | None
    encoding: str | None
    options: Mapping[str, str]

    def read(self, session: Any, **files: Any) -> "tuple[Any, EventSource | None]":
        """Return the events as a DataFrame, and the source unless it is files.

        Args:
            session: the Spark session.
            files: further arguments of ``read_events``, for files only: any other source has its own columns.

        Raises:
            SourceError: the events cannot be read.
        """
        from txbox_spark import read_events, read_source

        if self.source is not None:
            return read_source(session, self.source, options=self.options)
        events = read_events(
            session, self.paths, format=self.format, encoding=self.encoding, options=self.options, **files
        )
        return events, None


def chosen_events(
    paths: PathsArgument = None,
    source: SourceOption = None,
    format: FormatOption = None,  # noqa: A002 - the option's name
    encoding: EncodingOption = None,
    read_options: ReadOption = None,
) -> Events:
    """Return where the options say to read events from.

    Raises:
        UsageError: they name neither paths nor a source, or both, or an option does not fit.
    """
    options = pairs("--read-option", read_options)
    if bool(paths) == (source is not None):
        raise UsageError("name what to read: the paths of files, or a --source such as table:archive.purchases")
    if source is not None:
        from txbox_spark import SourceError
        from txbox_spark.reading.tables import check_source

        if format is not None or encoding is not None:
            raise UsageError("--format and --encoding are of files, and a --source has neither")
        try:
            check_source(source, options)
        except SourceError as error:
            raise UsageError(f"--source: {error}") from error
    return Events(list(paths or ()), source, format, encoding, options)


EventsOptions = Annotated[Events, ReadBy(chosen_events)]


def check_before_spark(
    db: DatabaseTarget,
    events: Events,
    master: str | None,
    *,
    ledger: bool,
    effect: "Apply | Upsert | None" = None,
    known_subscriber: str | None = None,
) -> None:
    """Check everything that can be checked before Spark starts, which takes long.

    The database must have the inbox, or with ``ledger`` the tables of bulk loads. Paths on this machine must exist. The
    statements of an ``effect`` must be valid SQL, and the table of an ``Upsert`` must fit it. A subscriber that must be
    known needs an id or a horizon, unless the inbox is empty: a mistyped name would apply every event again.
    """
    from txbox.effects import Upsert
    from txbox_spark import SourceError
    from txbox_spark.loading.ledger import LoadLedger, subscribers_instead_of
    from txbox_spark.merging.effect_runner import check_syntax
    from txbox_spark.reading.sources import FORMATS
    from txbox_spark.runtime.session import require_pyspark

    require_pyspark()
    if events.format is not None and events.format not in FORMATS:
        raise UsageError(f"--format {events.format} is unknown; use one of {', '.join(FORMATS)}")
    if _reads_this_machine(master):
        for path in events.paths:
            if not any(sign in path for sign in ("://", *"*?[{")) and not Path(path).exists():
                raise SourceError(f"there is nothing at {path}")
    if not ledger:
        require_table(db, "processed_message")
        return
    with db.engine() as engine, engine.connect() as connection:
        LoadLedger(engine, db.schema, db.prefix).check()
        if isinstance(effect, Upsert):
            try:
                effect.check(connection)
            except InvalidConfiguration as error:
                raise UsageError(f"--upsert-into: {error}") from error
        elif effect is not None:
            check_syntax(connection, effect)
        if known_subscriber is not None and (
            others := subscribers_instead_of(connection, db.schema, db.prefix, known_subscriber)
        ):
            raise UsageError(
                f"--subscriber: {known_subscriber} has no id in the inbox, so every event would be applied; there are "
                f"ids of {', '.join(others)}; if it is new, give --new-subscriber"
            )


def require_table(db: DatabaseTarget, name: str) -> None:
    """Raise ``SchemaMissing`` unless a table of ours exists."""
    from txbox.postgres.transactions import check_table
    from txbox.schema import tables

    with db.engine() as engine, engine.connect() as connection:
        check_table(connection, getattr(tables(db.schema, db.prefix), name))


def _reads_this_machine(master: str | None) -> bool:
    """Whether paths are on this machine: on a cluster, one without a scheme may be on a distributed file system."""
    from txbox_cli.settings import is_submitted, uses_hadoop

    return (master is None or master.startswith("local")) and not (is_submitted() or uses_hadoop())


def java_options(paths: Sequence[str], master: str | None) -> str:
    """Return the JVM options that load few and small files fastest; none for others.

    Code compiled by C2 pays off when it runs for minutes. A load of a few rows ends sooner, and on two processors C2
    takes a quarter of its time.
    """
    from txbox_spark.survey import FEW_BYTES

    files = [Path(path) for path in paths]
    if not (files and _reads_this_machine(master) and all(file.is_file() for file in files)):
        return ""
    return _WITHOUT_C2 if sum(file.stat().st_size for file in files) <= FEW_BYTES else ""


@contextmanager
def session(name: str, on: SparkOptions, java: str = "") -> Iterator[Any]:
    """Start a Spark session for one command, and stop it at the end. Kill a JVM that does not stop in time.

    ``java`` is what ``java_options`` returns; ``on.conf`` overrides it.

    Raises:
        UsageError: --fields names no columns.
        CommandFailed: Spark has died.
    """
    from txbox_spark import BulkLoadFailed, spark_session
    from txbox_spark.reading.errors import InvalidFields
    from txbox_spark.runtime.jvm import cause_of_death, kill_jvm
    from txbox_spark.runtime.session import mute_jvm, quiet_pyspark

    quiet_pyspark()  # before the start: py4j logs a traceback for a Ctrl-C during it
    interrupted_plainly(mute_jvm)
    settings = pairs("--conf", on.conf)
    if java:
        settings[_JAVA_OPTIONS] = f"{java} {settings.get(_JAVA_OPTIONS, '')}".strip()
    with seen_as_interrupt(), ended_in_time(kill_jvm):
        with _clock("starting Spark"):
            spark = spark_session(name, master=on.master, jdbc_jar=on.jdbc_jar, settings=settings)
        # Again: Spark has installed a handler that cancels jobs over the very connection that the signal interrupts.
        interrupted_plainly(mute_jvm)
        try:
            yield spark
        except InvalidFields as error:
            raise UsageError(f"--fields: {error}") from error
        except BulkLoadFailed:
            raise  # its message says more
        except Exception as error:
            if (died := cause_of_death()) is None:
                raise
            raise CommandFailed(f"{died}; then run it again") from error
        finally:
            try:
                spark.stop()
            except Exception:
                if cause_of_death() is None:  # otherwise there is nothing to stop
                    raise


@contextmanager
def _clock(what: str) -> Iterator[None]:
    """Show in a terminal how long something has taken, as there is no telling how long it will."""
    console = plain_console(stderr=True)
    if not console.is_terminal:
        yield
        return
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    with Progress(TextColumn("{task.description} …"), TimeElapsedColumn(), console=console) as progress:
        progress.add_task(what, total=None)
        yield


class CurrentRun:
    """The bulk load that a command runs. ``run_id`` is None before it begins."""

    run_id: str | None = None


@contextmanager
def progress_display(run: CurrentRun, *, silent: bool = False) -> "Iterator[Callable[[JobProgress], None]]":
    """Show a job's progress: bars in a terminal, otherwise lines, or nothing if ``silent``. Set ``run.run_id``."""
    console = plain_console(stderr=True)

    def shown_by(display: "Callable[[JobProgress], None]") -> "Callable[[JobProgress], None]":
        def show(job: "JobProgress") -> None:
            run.run_id = job.run_id
            display(job)

        return show

    if silent or not console.is_terminal:
        yield shown_by((lambda _: None) if silent else _Lines())
        return
    from rich.progress import TextColumn

    with progress_bars(console, TextColumn("{task.fields[remark]}")) as progress:
        yield shown_by(_Bars(progress))


@contextmanager
def job(
    name: str, on: SparkOptions, *, as_json: bool, java: str = "", run: CurrentRun | None = None
) -> "Iterator[tuple[Any, Callable[[JobProgress], None]]]":
    """Start a session for one command, and show the progress of its job, until a signal ends it.

    With ``as_json`` nothing is shown under spark-submit, which has one stream for all output.
    """
    from txbox_cli.settings import is_submitted

    with (
        terminated_as_interrupt(),
        session(name, on, java) as started,
        progress_display(run or CurrentRun(), silent=as_json and is_submitted()) as show,
    ):
        yield started, show


class _Lines:
    """Prints a line at the start and the end of each stage, and one every ``SECONDS_PER_LINE`` between."""

    def __init__(self) -> None:
        self._printed = ("", False)
        self._next_at = 0.0

    def __call__(self, job: "JobProgress") -> None:
        now = time.monotonic()
        if not job.total:  # Spark has not planned it yet
            return
        state = (job.stage, job.done == job.total)
        if state == self._printed and (now < self._next_at or job.done == job.total):
            return
        run = f"run {job.run_id}, " if job.run_id else ""
        typer.echo(f"{run}{job.stage}: {job.done} of {job.total}{_remark(job)}", err=True)
        self._printed, self._next_at = state, now + SECONDS_PER_LINE


class _Bars:
    """Shows a bar for each stage, and completes it when the next stage begins."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._tasks: dict[str, Any] = {}
        self._last: tuple[str, int] = ("", 0)

    def __call__(self, job: "JobProgress") -> None:
        before, total = self._last
        if job.stage not in self._tasks:
            if before:
                self._progress.update(self._tasks[before], completed=total, total=total)
            self._tasks[job.stage] = self._progress.add_task(job.stage, total=None, remark="")
        remark = _remark(job, self._progress.console.width - _BESIDE_REMARK).strip()
        self._progress.update(self._tasks[job.stage], completed=job.done, total=job.total or None, remark=remark)
        self._last = (job.stage, job.total)


def _remark(job: "JobProgress", characters: float = math.inf) -> str:
    """Return what is counted and how fast it proceeds, as far as there is room."""
    if job.stage != "merge":
        return " tasks"
    parts = [" chunks", f"{job.applied:,} events applied"]
    if (pace := job.pace) is not None and job.done < job.total:
        parts.append(f"{span(max(1, pace.seconds_left))} left")
        parts.append(f"{pace.rows_per_second:,.0f} rows a second")
        parts.append(f"{pace.chunks_per_minute:,.0f} chunks a minute")
    while len(parts) > 2 and len(", ".join(parts)) > characters:
        parts.pop()
    return ", ".join(parts)
