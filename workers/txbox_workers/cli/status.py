"""``txbox status``: what is done, what waits, what needs a person."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from txbox.status import read_status
from txbox_workers.cli.options import JsonOption, PrefixOption, SchemaOption, UrlOption, database, print_json

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
    table = Table("subscriber", "processed", "last", "retrying", "dead letters", box=None)
    for line in found.subscribers:
        dead = ", ".join(f"{count} {reason}" for reason, count in line.dead_letters.items())
        table.add_row(
            line.subscriber_id,
            "?" if line.processed is None else f"{line.processed:,}",
            "?" if line.last_processed_at is None else f"{line.last_processed_at:%Y-%m-%d %H:%M:%S}",
            f"{line.retrying:,}",
            dead or "0",
        )
    console = Console(markup=False)
    if found.subscribers:
        console.print(table)
    rows = f"{found.inbox_rows:,}" if found.exact else f"about {found.inbox_rows:,}"
    console.print(f"inbox: {rows} rows" + ("" if found.exact else "; --exact counts them per subscriber"))
    if backlog is not None:
        console.print("queue: " + ", ".join(f"{count:,} {what}" for what, count in backlog.items()))
