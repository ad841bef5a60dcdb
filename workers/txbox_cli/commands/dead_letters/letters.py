"""``txbox dead-letters list`` and ``show``."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from txbox import DeadLetter, DeadLetters
from txbox_cli.commands.dead_letters.filters import FilterOptions, refused_as_usage
from txbox_cli.options import DatabaseOptions, JsonOption
from txbox_cli.output import print_json, print_table, printable

ERROR_CHARACTERS = 100
"""Of an error in the list; `show` has all of it."""

LINE_ENDS = "\n\t"

TIME = "%Y-%m-%d %H:%M:%S"


def list_letters(
    which: FilterOptions,
    db: DatabaseOptions,
    redriven: Annotated[
        bool, typer.Option("--all", help="Also those that do not wait: redriven, discarded, processed since.")
    ] = False,
    after: Annotated[int, typer.Option(help="Only numbers greater than this: the next page.")] = 0,
    limit: Annotated[int, typer.Option(help="How many, at most.", min=1, max=10_000)] = 100,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, oldest first.

    Those of a relay were never received; their subscriber is txbox:outbox: and the destination.
    """
    with db.engine() as engine, refused_as_usage():
        letters = DeadLetters(engine, schema=db.schema, prefix=db.prefix).list(
            which, redriven=redriven, after=after, limit=limit
        )
    if as_json:
        print_json([summary(letter) for letter in letters])
        return
    if not letters:
        typer.echo("no dead letters")
        return
    print_letters(letters, states=redriven)
    if len(letters) == limit:
        typer.echo(f"there may be more: --after {letters[-1].dead_letter_id}")


def print_letters(letters: Sequence[DeadLetter], *, states: bool = False) -> None:
    """Print a line for each letter; ``states``: with what became of it."""
    more = ("state",) if states else ()
    keys = ("key",) if any(letter.order_key is not None for letter in letters) else ()
    print_table(
        ("no.", "subscriber", "message", *keys, "reason", "attempts", "parked", *more, "error"),
        [
            (
                str(letter.dead_letter_id),
                letter.subscriber_id,
                letter.message_id,
                *(letter.order_key or "" for _ in keys),
                letter.reason,
                str(letter.attempts),
                f"{letter.parked_at:{TIME}}",
                *(_state(letter) for _ in more),
                letter.error.partition("\n")[0][:ERROR_CHARACTERS],
            )
            for letter in letters
        ],
    )


def show(
    number: Annotated[int, typer.Argument(help="The letter's number, from `txbox dead-letters list`.")],
    db: DatabaseOptions,
    as_json: JsonOption = False,
) -> None:
    """Show one dead letter whole: its error, headers and body."""
    with db.engine() as engine:
        letter = DeadLetters(engine, schema=db.schema, prefix=db.prefix).get(number)
    if as_json:
        print_json(asdict(letter))
        return
    key = {"key": letter.envelope["outbox"].get("key")} if "outbox" in letter.envelope else {}
    shown = {name: value for name, value in summary(letter).items() if name not in ("history", "processed_since")}
    state = {"state": _state(letter) or None}
    for name, value in {**shown, **state, **key, "headers": dict(letter.headers)}.items():
        if value is not None:
            typer.echo(f"{name + ':':16}{printable(str(value), keep=LINE_ENDS)}")
    for one in letter.history:
        typer.echo(f"counted:        delivery {one['delivery']}, {one['at']}: {printable(one['error'])}")
    body = letter.body.decode("utf-8", "backslashreplace")
    typer.echo(f"body ({len(letter.body)} bytes):\n{printable(body, keep=LINE_ENDS)}")


def summary(letter: DeadLetter) -> dict[str, object]:
    """Return a letter as plain values, without its content."""
    return {name: value for name, value in asdict(letter).items() if name not in ("body", "headers", "envelope")}


def _state(letter: DeadLetter) -> str:
    """Say what became of a letter; empty: it waits."""
    if letter.redriven_at is not None:
        holds = "" if letter.order_position is None or letter.discarded_at is not None else ", holds its key"
        redriven = f"redriven {letter.redriven_at:{TIME}}{_by(letter.redriven_by)}{holds}"
        return redriven if letter.discarded_at is None else f"{redriven}; {_discarded(letter)}"
    if letter.discarded_at is not None:
        return _discarded(letter)
    return "processed since" if letter.processed_since else ""


def _discarded(letter: DeadLetter) -> str:
    return f"discarded {letter.discarded_at:{TIME}}{_by(letter.discarded_by)}: {letter.note}"


def _by(name: str | None) -> str:
    return "" if name is None else f" by {name}"
