"""What commands that read events from files have in common: their options, and a Spark session."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from txbox_workers.cli.errors import UsageError

__all__ = [
    "ConfOption",
    "FieldsOption",
    "FormatOption",
    "JarOption",
    "MasterOption",
    "MessageIdOption",
    "PathsArgument",
    "ReadOption",
    "SubscriberOption",
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


@contextmanager
def session(name: str, master: str | None, jdbc_jar: Path | None, conf: Sequence[str] | None) -> Iterator[Any]:
    """Start a Spark session for one command, and stop it."""
    from txbox_spark import spark_session

    spark = spark_session(name, master=master, jdbc_jar=jdbc_jar, settings=pairs("--conf", conf))
    try:
        yield spark
    finally:
        spark.stop()
