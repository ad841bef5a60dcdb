"""``txbox pause`` and ``txbox resume``: make workers or relays leave something alone for a while."""

from typing import TYPE_CHECKING, Annotated

import typer

from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.options import DatabaseOptions, DatabaseTarget, JsonOption, this_user
from txbox_cli.output import print_json

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from txbox.operations.pauses import Kind, Pause

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A subscriber, or a destination as it was published.", show_default=False)
]
KindOption = Annotated[
    bool | None,
    typer.Option("--subscriber/--destination", help="What NAME is, where both have this name.", show_default=False),
]


def pause(
    *,
    name: NameArgument,
    is_subscriber: KindOption = None,
    note: Annotated[str | None, typer.Option(help="Why; `txbox status` shows it.")] = None,
    by: Annotated[str | None, typer.Option(help="Who asks for it. Without it: this user and host.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also a name that has left no trace yet.")] = False,
    db: DatabaseOptions,
    as_json: JsonOption = False,
) -> None:
    """Pause a subscriber or a destination, until `txbox resume`.

    Within 5 seconds, all workers of the subscriber finish the transactions under way, hand back what they have not
    begun, and receive nothing more; they keep running, and those that start meanwhile start paused. `txbox status` says
    which of them are drained. Of a destination, relays leave the messages where they are, in their order.

    Functions in Lambda take no notice: disable their event source mapping.
    """
    from txbox.operations import pauses

    with db.engine() as engine:
        kind = _kind(engine, db, name, is_subscriber, force=force)
        asked_by = by or this_user()
        named = {"subscriber_id": name} if kind == "subscriber" else {"destination": name}
        is_new = pauses.pause(engine, **named, by=asked_by, note=note, schema=db.schema, prefix=db.prefix)
        found = next((one for one in _read(engine, db) if (one.kind, one.name) == (kind, name)), None)
    if as_json:
        print_json({"kind": kind, "name": name, "paused": found is not None, "new": is_new})
    elif is_new or found is None:
        typer.echo(f"paused: {kind} {name}; `txbox status` says when it is drained, `txbox resume` ends it")
    else:
        since = "" if found.paused_at is None else f" since {found.paused_at:%Y-%m-%d %H:%M:%S}"
        typer.echo(f"already paused: {kind} {name}, by {found.paused_by}{since}")


def resume(
    *,
    name: NameArgument,
    is_subscriber: KindOption = None,
    db: DatabaseOptions,
    as_json: JsonOption = False,
) -> None:
    """End a pause: within 5 seconds, workers or relays go on with what waits.

    Exit status 1 if nothing of this name is paused.
    """
    from txbox.operations import pauses

    with db.engine() as engine:
        paused = [one for one in _read(engine, db) if one.name == name]
        kinds = [one.kind for one in paused if is_subscriber in (None, one.kind == "subscriber")]
        if not kinds:
            raise CommandFailed(f"{name} is not paused; `txbox status` shows what is")
        if len(kinds) > 1:
            raise UsageError(f"a subscriber and a destination are paused as {name}; add --subscriber or --destination")
        named = {"subscriber_id": name} if kinds[0] == "subscriber" else {"destination": name}
        pauses.resume(engine, **named, schema=db.schema, prefix=db.prefix)
    if as_json:
        print_json({"kind": kinds[0], "name": name, "paused": False})
    else:
        typer.echo(f"resumed: {kinds[0]} {name}")


def _read(engine: "Engine", db: DatabaseTarget) -> "tuple[Pause, ...]":
    from txbox.operations.pauses import read_pauses

    with engine.connect() as connection:
        return read_pauses(connection, schema=db.schema, prefix=db.prefix)


def _kind(engine: "Engine", db: DatabaseTarget, name: str, is_subscriber: bool | None, *, force: bool) -> "Kind":
    """Return whether this name is a subscriber's or a destination's.

    Raises:
        UsageError: it is both, or neither.
    """
    from txbox.operations.pauses import find_named, read_pauses

    asked: Kind | None = None if is_subscriber is None else "subscriber" if is_subscriber else "destination"
    if asked is not None and force:
        return asked
    with engine.connect() as connection:
        read_pauses(connection, schema=db.schema, prefix=db.prefix)  # raises if the schema is missing
        found = find_named(connection, name, schema=db.schema, prefix=db.prefix)
    if asked is not None and asked in found:
        return asked
    if asked is None and len(found) == 1:
        return found[0]
    if asked is None and found:
        raise UsageError(f"there is a subscriber and a destination {name}; add --subscriber or --destination")
    which = asked or "subscriber or destination"
    remedy = "--force" if asked else "--subscriber --force or --destination --force"
    raise UsageError(f"no {which} {name} has left a trace here; is it spelled so? If it is to come, add {remedy}")
