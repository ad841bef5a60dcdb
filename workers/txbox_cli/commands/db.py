"""``txbox db``: create and change the tables, and compare them with what they should be."""

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from sqlalchemy import inspect

from txbox.maintenance.rotation import Generations, InboxConversion
from txbox.schema import tables
from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.options import Commands, DatabaseOptions, JsonOption
from txbox_cli.output import print_json, printable
from txbox_migrations import LATEST, Severity, downgrade_database, find_drift, upgrade_database
from txbox_migrations.environment import is_of_host
from txbox_migrations.steps import BASELINE

app = Commands(help="Create, change and check the tables.")


@app.command()
def upgrade(
    db: DatabaseOptions,
    to: Annotated[int, typer.Option(help="The version to reach.", min=BASELINE, max=LATEST)] = LATEST,
) -> None:
    """Create the tables, or bring them up to date.

    Our version is kept in a table of our own, so your alembic history is not touched. To run the steps from a
    revision of your own instead, call `txbox_migrations.upgrade(op, to=N)` there.
    """
    with db.engine() as engine:
        change = upgrade_database(engine, schema=db.schema, prefix=db.prefix, to=to)
    _say_change(change.before, change.after)


@app.command()
def downgrade(
    to: Annotated[int, typer.Option(help="The version to go back to; 0 drops every table.", min=0, max=LATEST)],
    db: DatabaseOptions,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: what the dropped tables hold is lost.")] = False,
) -> None:
    """Take the tables back to an earlier version."""
    if not yes and not sys.stdin.isatty():
        raise UsageError("what the dropped tables hold is lost; if that is meant, give --yes")
    if not yes:
        typer.confirm("What the dropped tables hold is lost, duplicates will not be recognised. Go on?", abort=True)
    with db.engine() as engine:
        change = downgrade_database(engine, schema=db.schema, prefix=db.prefix, to=to)
    _say_change(change.before, change.after)


@app.command(short_help="Compare the tables with what they should be.")
def check(
    db: DatabaseOptions,
    as_json: JsonOption = False,
) -> int:
    """Compare the live tables with what they should be: columns, keys, CHECK constraints, indexes.

    Exit status 1 if something that matters is missing or different.
    """
    with db.engine() as engine, engine.connect() as connection:
        differences = find_drift(connection, schema=db.schema, prefix=db.prefix)
        ours = not is_of_host(connection, schema=db.schema, prefix=db.prefix)
        live = inspect(connection)
        names = (table.name for table in tables(db.schema, db.prefix).metadata.tables.values())
        there_are_none = bool(differences) and not any(live.has_table(name, schema=db.schema) for name in names)
    harmful = [difference for difference in differences if difference.severity is Severity.DRIFT]
    if as_json:
        print_json({"ok": not harmful, "differences": [asdict(difference) for difference in differences]})
    else:
        for difference in differences:
            typer.echo(f"{difference.severity}: {difference}")
        upgraded = " ".join(["txbox db upgrade", db.options]).rstrip()
        remedy = f"run `{upgraded}`" if ours else "upgrade them in your own migrations"
        if there_are_none:
            own = "your own migrations if they make txbox's tables"
            typer.echo(f"there are no tables that this role can see; {remedy}, or {own}")
        else:
            typer.echo(f"the tables differ; repair them, or {remedy}" if harmful else "the tables are right")
    return 1 if harmful else 0


@app.command("rotate-inbox", short_help="Turn the inbox into a rotating one, online, or back.")
def rotate_inbox(
    db: DatabaseOptions,
    back: Annotated[bool, typer.Option("--back", help="Turn it into one table again.")] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Change nothing: show its form, and what stands in the way.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Turn a live inbox into one that rotates, while workers go on, or back with --back.

    A rotating inbox is in generations: the newest takes what is recorded, and the oldest is forgotten by DROP TABLE, at
    once. What is exclusive takes milliseconds; it reads every row once before, and with
    --back it moves the rows of older generations. Interrupted, it goes on when it is run again. It needs the rights of
    the tables' owner. Exit status 1 if transactions that do not end kept it from its lock, or for --status if
    something stands in the way.
    """
    steps: list[str] = []

    def say(step: str) -> None:
        steps.append(step)
        if not as_json:
            typer.echo(step)

    place: Any = {"schema": db.schema, "prefix": db.prefix}
    with db.engine() as engine:
        conversion = InboxConversion(engine, **place, say=say)
        before = conversion.rotating()
        hindrances = conversion.hindrances() if status else []
        done = not hindrances if status else conversion.back() if back else conversion.forward()
        rotating = conversion.rotating()
        generations = Generations(engine, **place).list()
    if as_json:
        listed = [asdict(generation) for generation in generations]
        print_json({"rotating": rotating, "steps": steps, "hindrances": hindrances, "generations": listed, "ok": done})
    elif status:
        typer.echo("the inbox rotates" if rotating else "the inbox is one table")
        for one in generations:
            closed = f"closed {one.closed_at:%Y-%m-%d %H:%M}" if one.closed_at else "current"
            typer.echo(f"  generation {one.generation}: {closed}, about {one.rows} rows, {one.bytes} bytes")
        for hindrance in hindrances:
            typer.echo(f"in the way: {printable(hindrance)}")
    elif not done:
        raise CommandFailed("transactions that use the inbox did not end; run it again when they have: it goes on")
    elif before == rotating and not steps:
        typer.echo("the inbox rotates already" if rotating else "the inbox is one table already")
    return 0 if done else 1


def _say_change(before: int, after: int) -> None:
    typer.echo(f"already at version {after}" if before == after else f"version {before} → {after}")
