"""``txbox loads show``."""

import shlex
from dataclasses import asdict

import typer

from txbox.loads import BulkLoad, BulkLoads, LoadState
from txbox.status import find_blocked_loads
from txbox_cli.commands.loads.listing import TIME, RunArgument, find_run
from txbox_cli.errors import CommandFailed
from txbox_cli.options import Database, DatabaseOptions, JsonOption
from txbox_cli.output import print_counts, print_json, printable

REMARKS = {
    "read": "rows of the source",
    "rejected": "rows that cannot be loaded",
    "duplicate_in_source": "rows whose id another row has",
    "already_processed": "events that were processed before",
    "parked": "events that wait as dead letters",
    "expired": "events sent before the horizon, and not applied",
    "applied": "events that were first",
    "left": "rows of chunks that are not merged",
}
"""What was counted."""

WRITE_AGAIN = "write the same events once more, or let the stream go on: what has been applied is not applied again"
"""Advice for a write of format txbox, which cannot be resumed."""


def show(run: RunArgument, db: DatabaseOptions, as_json: JsonOption = False) -> None:
    """Show one run: what it loads, how far it is, what it waits for, and how to finish it.

    The counts add up: read is the sum of the others. Of a write of Spark's format txbox that has not finished, it is
    not known how many rows there are.
    """
    with db.engine() as engine:
        ledger = BulkLoads(engine, schema=db.schema, prefix=db.prefix)
        run_id = find_run(ledger, run)
        found = ledger.get(run_id)
        with engine.connect() as connection:
            blocked = find_blocked_loads(connection, run_id)
    if found is None:
        raise CommandFailed(f"bulk load {run_id} was forgotten meanwhile")
    load, sample = found
    finish = None if load.state is LoadState.FINISHED or load.is_write else _finish(load, db)
    if as_json:
        waits = [asdict(one) for one in blocked]
        print_json({**asdict(load), "rejected_sample": list(sample), "blocked": waits, "finish": finish})
        return
    facts = {
        "run": load.run_id,
        "state": load.state,
        "subscriber": load.subscriber_id,
        "source": load.source,
        "writer": load.writer,
        "chunks": f"{load.merged} of {load.chunks} merged",
        "attempts": str(load.attempts),
        "began": f"{load.started_at:{TIME}}",
        "last heard of": f"{load.heartbeat_at:{TIME}}",
        "finished": f"{load.finished_at:{TIME}}" if load.finished_at else None,
        "staging table": load.staging_table,
        "error": load.error,
    }
    for name, value in facts.items():
        if value is not None:
            typer.echo(f"{name + ':':16}{printable(value)}")
    print_counts([(name.replace("_", " "), count, REMARKS[name]) for name, count in asdict(load.counts).items()])
    for row in sample:
        typer.echo(f"rejected: {printable(row)}")
    for one in blocked:
        typer.echo(f"blocked: {printable(str(one))}")
    if finish is not None:
        typer.echo(f"to finish it, with the paths and options that it was begun with: {printable(finish)}")
    elif load.state in (LoadState.FAILED, LoadState.STOPPED):
        typer.echo(f"to finish it, {WRITE_AGAIN}")


def _finish(load: BulkLoad, db: Database) -> str:
    """Return the command that finishes a run, as far as the ledger knows it."""
    options = f" {db.options}" if db.options else ""
    is_table = load.source.startswith(("table:", "delta:", "iceberg:", "jdbc:"))
    what = f"--source {shlex.quote(load.source.partition(' ')[0])}" if is_table else "PATH..."
    return (
        f"txbox loads resume {load.run_id} {what} --subscriber {shlex.quote(load.subscriber_id)} --message-id COLUMN "
        f"--apply FILE.sql{options}"
    )
