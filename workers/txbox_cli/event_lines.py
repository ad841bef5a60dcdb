"""What commands that read events from files have in common: their options, and a Spark session."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from txbox.postgres.transactions import check_table
from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.options import Database
from txbox_cli.output import plain_console
from txbox_cli.signals import ended_in_time, interrupted_plainly, seen_as_interrupt

__all__ = [
    "ConfOption",
    "EncodingOption",
    "FieldsOption",
    "FormatOption",
    "JarOption",
    "MasterOption",
    "MessageIdOption",
    "PathsArgument",
    "ReadOption",
    "SubscriberOption",
    "check_before_spark",
    "is_submitted",
    "pairs",
    "session",
]

PathsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...", help="Files or folders: Parquet, JSON lines or CSV; s3a://bucket/folder where Spark can."
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
    str | None, typer.Option("--format", help="parquet, json or csv; by default the file names tell.")
]
FieldsOption = Annotated[
    str | None,
    typer.Option(
        "--fields", metavar="DDL", help="Columns and types of JSON or CSV: 'event_id string, amount decimal(12,2)'."
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
JarOption = Annotated[
    Path | None, typer.Option("--jdbc-jar", metavar="FILE", help="Postgres's JDBC driver, where Spark cannot fetch it.")
]
ConfOption = Annotated[
    list[str] | None,
    typer.Option(
        "--conf", metavar="NAME=VALUE", help="A setting of Spark, such as spark.driver.memory=4g. Repeatable."
    ),
]


def pairs(option: str, given: Sequence[str] | None) -> dict[str, str]:
    """Read the values of a repeatable option of the form NAME=VALUE.

    Raises:
        UsageError: one of them is not of that form.
    """
    found = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not (name and equals):
            raise UsageError(f"{option} takes NAME=VALUE, not {one!r}")
        found[name] = value
    return found


def check_before_spark(
    place: Database,
    paths: Sequence[str],
    format_: str | None,
    master: str | None,
    *,
    ledger: bool,
    resume: str | None = None,
) -> None:
    """Find out in a moment what is wrong: Spark takes its time to start.

    Args:
        place: the database, which must have the inbox.
        paths: of the events; those on this machine must exist.
        format_: of the events.
        master: where Spark is to run.
        ledger: the tables of bulk loads must be there, too.
        resume: a run that must be there.
    """
    from txbox_spark import SourceError
    from txbox_spark.loading.ledger import LoadLedger, RunNotFound
    from txbox_spark.merging.statements import load_statements
    from txbox_spark.reading.sources import FORMATS
    from txbox_spark.runtime.session import require_pyspark

    require_pyspark()
    if format_ is not None and format_ not in FORMATS:
        raise UsageError(f"--format {format_} is unknown; use one of {', '.join(FORMATS)}")
    # Elsewhere a path without a scheme may be one of a distributed file system.
    if (master is None or master.startswith("local")) and not {_SUBMITTED, "HADOOP_CONF_DIR"} & os.environ.keys():
        for path in paths:
            if not any(sign in path for sign in ("://", *"*?[{")) and not Path(path).exists():
                raise SourceError(f"there is nothing at {path}")
    sql = load_statements(place.schema, place.prefix)
    with place.engine() as engine:
        if ledger:
            LoadLedger(engine, sql).check()
            if resume is not None:
                try:
                    LoadLedger(engine, sql).read(resume)
                except RunNotFound as error:
                    raise UsageError(f"--resume: {error}") from error
        else:
            with engine.connect() as connection:
                check_table(connection, sql.tables.processed_message)


def is_submitted() -> bool:
    """Whether spark-submit runs this command; it has one stream for what a program prints and what it warns of."""
    return _SUBMITTED in os.environ


@contextmanager
def session(name: str, master: str | None, jdbc_jar: Path | None, conf: Sequence[str] | None) -> Iterator[Any]:
    """Start a Spark session for one command, and stop it; a JVM that does not stop in time is killed.

    Raises:
        UsageError: the columns that were given are none.
        CommandFailed: Spark has died.
    """
    from txbox_spark import BulkLoadFailed, spark_session
    from txbox_spark.runtime.jvm import cause_of_death, kill_jvm
    from txbox_spark.runtime.session import quiet_pyspark

    console = plain_console(stderr=True)
    if console.is_terminal:
        console.print("starting Spark …", style="dim")
    spark = spark_session(name, master=master, jdbc_jar=jdbc_jar, settings=pairs("--conf", conf))
    # Spark's own handler cancels jobs over the connection that it interrupts, which ends in pages of tracebacks.
    interrupted_plainly()
    quiet_pyspark()
    from txbox_spark.reading.errors import InvalidFields

    with seen_as_interrupt(), ended_in_time(kill_jvm):
        try:
            yield spark
        except InvalidFields as error:
            raise UsageError(f"--fields: {error}") from error
        except BulkLoadFailed:
            raise  # it says more
        except Exception as error:
            if (died := cause_of_death()) is None:
                raise
            raise CommandFailed(f"{died}; then run it again") from error
        finally:
            _stop(spark)


def _stop(spark: Any) -> None:
    """Stop a session; there is nothing to stop where Spark has died."""
    from txbox_spark.runtime.jvm import cause_of_death

    try:
        spark.stop()
    except Exception:
        if cause_of_death() is None:
            raise


_SUBMITTED = "PYSPARK_GATEWAY_PORT"
