"""``txbox loads list``, and how all commands on runs find one."""

from dataclasses import asdict
from typing import Annotated

import typer

from txbox.loads import BulkLoads, LoadState
from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.options import DatabaseOptions, JsonOption
from txbox_cli.output import print_json, print_table

ERROR_CHARACTERS = 100
"""Of an error in the list; `show` has all of it."""

TIME = "%Y-%m-%d %H:%M:%S"

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Its id, from `txbox loads list`, or as much of it as no other has.", show_default=False
    ),
]


def list_loads(
    db: DatabaseOptions,
    subscriber: Annotated[str | None, typer.Option(help="Only those for this subscriber.")] = None,
    state: Annotated[LoadState | None, typer.Option(help="Only those in this state.")] = None,
    limit: Annotated[int, typer.Option(help="How many, at most.", min=1, max=10_000)] = 100,
    as_json: JsonOption = False,
) -> None:
    """List the runs of bulk loads, the last begun first.

    One that is running was heard of within a minute. One that has stopped was interrupted or killed.
    """
    with db.engine() as engine:
        ledger = BulkLoads(engine, schema=db.schema, prefix=db.prefix)
        ledger.check()
        found = ledger.list(subscriber_id=subscriber, state=state, limit=limit)
    if as_json:
        print_json([asdict(load) for load in found])
        return
    if not found:
        typer.echo("no bulk loads")
        return
    print_table(
        ("run", "state", "subscriber", "source", "chunks", "applied", "began", "last heard of", "error"),
        [
            (
                load.run_id,
                load.state,
                load.subscriber_id,
                load.source,
                f"{load.merged} of {load.chunks}",
                f"{load.counts.applied:,}",
                f"{load.started_at:{TIME}}",
                f"{load.finished_at or load.heartbeat_at:{TIME}}",
                (load.error or "").partition("\n")[0][:ERROR_CHARACTERS],
            )
            for load in found
        ],
    )
    if len(found) == limit:
        typer.echo("there may be more: a larger --limit")


def find_run(ledger: BulkLoads, start: str) -> str:
    """Return the id of the run that begins with a text.

    Raises:
        UsageError: several do.
        CommandFailed: none does.
    """
    ledger.check()
    found = ledger.run_ids(start)
    if start in found or len(found) == 1:
        return start if start in found else found[0]
    if found:
        raise UsageError(f"{len(found)} runs begin with {start!r}: {', '.join(found[:3])}, …; give more of the id")
    raise CommandFailed(f"there is no bulk load {start!r} in this database; see `txbox loads list`")
