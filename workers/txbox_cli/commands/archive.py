"""``txbox archive``: move what was sent and processed into Parquet by day, so that Postgres may forget it."""

from typing import TYPE_CHECKING, Annotated

import typer

from txbox_cli import spark
from txbox_cli.errors import CommandFailed
from txbox_cli.options import DatabaseOptions, DatabaseTarget, JsonOption, read_span
from txbox_cli.output import counted, print_json

if TYPE_CHECKING:
    from txbox_spark import ArchiveReport


def archive(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The archive's own: a path, or s3a://bucket/folder.")],
    db: DatabaseOptions,
    wait: Annotated[
        str, typer.Option("--wait", metavar="SPAN", help="How long to wait for transactions that are open.")
    ] = "1m",
    release: Annotated[
        bool,
        typer.Option("--release", help="Archive nothing, and let Postgres forget what this archive does not have."),
    ] = False,
    *,
    on: spark.Runtime,
    as_json: JsonOption = False,
) -> int:
    """Move what was sent and processed to Parquet, so that Postgres may forget it.

    A Spark job, for once a day. It adds the days (UTC) that are over for an hour: what relays have sent and keep
    (`txbox relay --keep-sent 30d`), and the ids of every subscriber's inbox. Run it again after a crash: it finishes
    what was begun. From the first run on, `txbox maintain` and relays forget nothing that the archive does not have,
    whatever their windows; `txbox status` shows how far it is. `txbox reconcile --archive` and `txbox audit --archive`
    read it.

    FOLDER/sent and FOLDER/processed are folders that Spark, DuckDB, Athena and others read as they are.
    """
    span = read_span("--wait", wait)
    from txbox_spark.runtime.session import require_pyspark

    require_pyspark()
    spark.require_table(db, "archive")
    if release:
        return _release(folder, db)
    from txbox_spark import archive as move

    with spark.job("txbox archive", on, as_json=as_json) as (session, show):
        report = move(
            session,
            folder,
            url=db.url,
            schema=db.schema,
            prefix=db.prefix,
            wait_seconds=span.total_seconds(),
            on_progress=show,
        )
    if as_json:
        print_json(report.as_dict())
    else:
        _print(report)
    return 0


def _release(folder: str, db: DatabaseTarget) -> int:
    from txbox_spark.archive.archiver import release

    if not release(folder, url=db.url, schema=db.schema, prefix=db.prefix):
        raise CommandFailed(f"the database knows no archive at {folder}; `txbox status` shows those that there are")
    typer.echo(f"released: {folder}; its files stay, and Postgres may forget what they do not have")
    return 0


def _print(report: "ArchiveReport") -> None:
    if report.finished_earlier:
        typer.echo("put in place what an earlier run had written")
    if report.days or report.since != report.upto:
        typer.echo(
            f"archived: {counted(report.days, 'day')}, {report.sent:,} sent messages, {report.processed:,} rows of "
            "inboxes"
        )
    upto = "nothing" if report.upto is None else f"everything before {report.upto:%Y-%m-%d} 00:00 UTC"
    typer.echo(f"{report.location} has {upto}")
