"""``txbox status``: what is done, what waits, what needs a person."""

from typing import Annotated

import typer

from txbox.status import SubscriberStatus, read_status
from txbox_workers.cli.options import (
    JsonOption,
    PrefixOption,
    SchemaOption,
    UrlOption,
    database,
    require_queue_url,
)
from txbox_workers.cli.output import print_json, print_table

__all__ = ["status"]


def status(
    url: UrlOption = None,
    schema: SchemaOption = None,
    prefix: PrefixOption = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Count the inbox even if that reads millions of rows.")
    ] = False,
    queue_url: Annotated[str | None, typer.Option("--queue", help="Also ask this SQS queue for its backlog.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is processed, what waits for another attempt, and what is parked, per subscriber."""
    if queue_url is not None:
        require_queue_url(queue_url)
    place = database(url, schema, prefix)
    with place.engine() as engine:
        found = read_status(engine, schema=place.schema, prefix=place.prefix, exact=exact)
    backlog = None
    if queue_url:
        from txbox_workers.sqs import queue_backlog

        backlog = queue_backlog(queue_url)
    if as_json:
        print_json({**found.as_dict(), **({"queue": backlog} if backlog is not None else {})})
        return
    if found.subscribers:
        headings = ("subscriber", "processed", "last", "retrying", "dead letters")
        print_table(headings, [_row(line) for line in found.subscribers])
    rows = f"{found.inbox_rows:,}" if found.exact else f"about {found.inbox_rows:,}"
    typer.echo(f"inbox: {rows} rows" + ("" if found.exact else "; --exact counts them per subscriber"))
    if backlog is not None:
        typer.echo("queue: " + ", ".join(f"{count:,} {what}" for what, count in backlog.items()))


def _row(line: SubscriberStatus) -> tuple[str, ...]:
    dead = ", ".join(f"{count} {reason}" for reason, count in line.dead_letters.items())
    return (
        line.subscriber_id,
        "?" if line.processed is None else f"{line.processed:,}",
        "?" if line.last_processed_at is None else f"{line.last_processed_at:%Y-%m-%d %H:%M:%S}",
        f"{line.retrying:,}",
        dead or "0",
    )
