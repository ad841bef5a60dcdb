"""``txbox reconcile``: compare an archive of events with the inbox."""

from typing import TYPE_CHECKING, Annotated

import typer

from txbox_cli import spark
from txbox_cli.errors import UsageError
from txbox_cli.options import DatabaseOptions, JsonOption
from txbox_cli.output import print_counts, print_json, printable

if TYPE_CHECKING:
    from txbox_spark import Reconciliation


def reconcile(
    events: spark.EventsOptions,
    subscriber: spark.SubscriberOption,
    message_id: spark.MessageIdOption,
    db: DatabaseOptions,
    fields: spark.FieldsOption = None,
    archive: spark.ArchiveOption = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Write all of them there, as Parquet; a folder that is not there."),
    ] = None,
    sample: Annotated[int, typer.Option(help="How many ids of each kind to show.", min=0)] = 10,
    partitions: Annotated[int | None, typer.Option(help="Tasks that read the inbox.", min=1)] = None,
    *,
    on: spark.Runtime,
    as_json: JsonOption = False,
) -> int:
    """Find the events of an archive that were never processed, and the ids in the inbox that are in no archive.

    A Spark job; nothing is changed. Workers may go on meanwhile; what they process then may be reported.

    Exit status 0 only if every row of the archive is known to be processed: 1 if an event was not, or if a row cannot
    be loaded.
    """
    if events.source is not None and fields is not None:
        raise UsageError("--fields is of files; a --source has its own columns")
    from txbox_spark import reconcile as compare

    spark.check_before_spark(db, events, on.master, ledger=False)
    with spark.job("txbox reconcile", on, as_json=as_json) as (session, show):
        found = compare(
            events.read(session, schema=fields)[0],
            url=db.url,
            subscriber_id=subscriber,
            message_id=message_id,
            schema=db.schema,
            prefix=db.prefix,
            forgotten=archive,
            output=output,
            sample=sample,
            partitions=partitions,
            on_progress=show,
        )
    if as_json:
        print_json(found.as_dict())
    else:
        _print(found)
    return 0 if found.complete else 1


def _print(found: "Reconciliation") -> None:
    from txbox.operations.audit.report import COUNTS

    others = {"parked": found.parked, "expired": found.expired, "discarded": found.discarded}
    rows = [
        ("archived", found.archived, "different ids in the archive"),
        ("duplicate in archive", found.duplicate_in_archive, "rows whose id another row has"),
        ("rejected", found.rejected, "rows that cannot be loaded, so they are not compared"),
        ("processed", found.processed, "ids in the inbox"),
        ("never processed", found.never_processed, "archived, and not in the inbox"),
        *((name, count, f"of those{COUNTS[name].removeprefix('of them')}") for name, count in others.items() if count),
        ("not archived", found.not_archived, "in the inbox, and not in the archive"),
    ]
    print_counts(rows)
    for message_id in found.never_processed_sample:
        typer.echo(f"never processed: {printable(message_id)}")
    for one in found.not_archived_sample:
        typer.echo(f"not archived: {printable(one.message_id)}, processed {one.processed_at:%Y-%m-%d %H:%M:%S}")
    if found.output:
        typer.echo(f"written to {found.output}")
    if not found.complete:
        missing = f"{found.never_processed:,} events were not processed, {found.rejected:,} rows cannot be compared"
        typer.echo(f"not every row of the archive is known to be processed: {missing}")
