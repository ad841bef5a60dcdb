"""``txbox loads forget``."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from txbox.loads import BulkLoads
from txbox_cli.commands.loads.listing import find_run
from txbox_cli.errors import UsageError
from txbox_cli.options import DatabaseOptions, JsonOption, read_moment
from txbox_cli.output import counted, print_json

RUNNING = "it is running, or was heard of within a minute; wait, or give --force: then its process fails"


def forget(
    db: DatabaseOptions,
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN...", help="Their ids, or as much of them as no other has.", show_default=False),
    ] = None,
    finished_before: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="All that were finished before then: 30d, or 2026-03-01T08:00Z."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also one that is running: its process fails.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Delete runs of bulk loads from the ledger, with their staging tables.

    What they have applied stays, and their events stay in the inbox: loaded again, they are found there. But a run that
    is not finished can no longer be resumed. `txbox maintain --keep-loads 30d` forgets finished ones by itself.

    Exit status 1 if one was not deleted.
    """
    if bool(runs) == (finished_before is not None):
        raise UsageError("say which runs: their ids, or --finished-before")
    with db.engine() as engine:
        ledger = BulkLoads(engine, schema=db.schema, prefix=db.prefix)
        if finished_before is not None:
            moment = read_moment("--finished-before", finished_before)
            ledger.check()
            chosen = ledger.finished_before(moment if isinstance(moment, datetime) else datetime.now(UTC) - moment)
        else:
            chosen = [find_run(ledger, run) for run in runs or ()]
        gone = {run_id: ledger.forget(run_id, force=force) for run_id in chosen}
    forgotten = [run_id for run_id, is_gone in gone.items() if is_gone]
    running = [run_id for run_id, is_gone in gone.items() if not is_gone]
    if as_json:
        print_json({"forgotten": forgotten, "running": running})
    else:
        typer.echo(
            f"{counted(len(forgotten), 'run')} forgotten; what was applied stays, and so do the ids in the inbox"
        )
        for run_id in running:
            typer.echo(f"txbox: run {run_id} is not forgotten: {RUNNING}", err=True)
    return 1 if running else 0
