"""``txbox loads``: look at the runs of bulk loads, finish them, forget them."""

import shlex
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from txbox.status import find_blocked_loads
from txbox.status.bulk_loads import BulkLoad, BulkLoads, LoadState
from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.options import DatabaseOptions, DatabaseTarget, JsonOption, read_moment
from txbox_cli.output import counted, print_counts, print_json, print_table, printable

ERROR_CHARACTERS = 100
"""Characters of an error in the list; `show` prints all of it."""

TIME = "%Y-%m-%d %H:%M:%S"

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
"""What each count means."""

WRITE_AGAIN = "write the same events once more, or let the stream go on: what has been applied is not applied again"
"""Advice for a write of format txbox, which cannot be resumed."""

RUNNING = "it is running, or was heard of within a minute; wait, or give --force: then its process fails"

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


def _finish(load: BulkLoad, db: DatabaseTarget) -> str:
    """Return the command that finishes a run, as far as the ledger knows it."""
    options = f" {db.options}" if db.options else ""
    is_table = load.source.startswith(("table:", "delta:", "iceberg:", "jdbc:"))
    what = f"--source {shlex.quote(load.source.partition(' ')[0])}" if is_table else "PATH..."
    return (
        f"txbox bulk-load --resume {load.run_id} {what} --subscriber {shlex.quote(load.subscriber_id)} "
        f"--message-id COLUMN --apply FILE.sql{options}"
    )


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


def find_run(ledger: BulkLoads, start: str) -> str:
    """Return the id of the run that begins with this text.

    Raises:
        UsageError: several runs do.
        CommandFailed: none does.
    """
    ledger.check()
    found = ledger.run_ids(start)
    if start in found or len(found) == 1:
        return start if start in found else found[0]
    if found:
        raise UsageError(f"{len(found)} runs begin with {start!r}: {', '.join(found[:3])}, …; give more of the id")
    raise CommandFailed(f"there is no bulk load {start!r} in this database; see `txbox loads list`")


def run_to_resume(db: DatabaseTarget, start: str) -> str:
    """Return the id of the run that begins with this text and that `txbox bulk-load` can finish.

    Raises:
        UsageError: there is none, or more than one.
        CommandFailed: it is a write of format txbox.
    """
    with db.engine() as engine:
        ledger = BulkLoads(engine, schema=db.schema, prefix=db.prefix)
        try:
            run_id = find_run(ledger, start)
        except CommandFailed as error:
            raise UsageError(f"--resume: {error}") from error
        found = ledger.get(run_id)
    if found is not None and found[0].is_write:
        raise CommandFailed(f"run {run_id} is a write of Spark's format txbox, which is not resumed: {WRITE_AGAIN}")
    return run_id
