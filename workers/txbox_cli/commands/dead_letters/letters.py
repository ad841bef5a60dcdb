"""``txbox dead-letters list`` and ``show``."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from txbox import DeadLetter, DeadLetters
from txbox_cli.commands.dead_letters.filters import FilterOptions, refused_as_usage, tell_passed_over
from txbox_cli.errors import CommandFailed
from txbox_cli.options import DatabaseOptions, JsonOption
from txbox_cli.output import print_json, print_table, printable

ERROR_CHARACTERS = 100
"""Characters of an error in the list; `show` prints all of it."""

BODY_BYTES = 64 * 1024
"""The most bytes of a body that `show` prints."""

PART_BYTES = 8 * 1024 * 1024
"""Bytes read at a time for a body's file. Of a compressed body, the server unpacks everything before them each time."""

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
        tell_passed_over(engine, db, which, redriven=redriven)
        letters = DeadLetters(engine, schema=db.schema, prefix=db.prefix).list(
            which, redriven=redriven, after=after, limit=limit, body_bytes=0
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
    """Print a line for each letter; with ``states``, also what became of it."""
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
    body_to: Annotated[
        Path | None, typer.Option("--body-to", metavar="FILE", help="Write the whole body to it, as it was delivered.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show one dead letter, with the beginning of its body.

    The whole body is written by --body-to, and is part of --json.
    """
    with db.engine() as engine:
        letters = DeadLetters(engine, schema=db.schema, prefix=db.prefix)
        letter = letters.get(number, body_bytes=None if as_json else BODY_BYTES)
        if body_to is not None:
            _write_body(letters, letter, body_to)
    if as_json:
        print_json(asdict(letter))
        return
    key = {"key": letter.envelope["outbox"].get("key")} if "outbox" in letter.envelope else {}
    left_out = ("history", "processed_since", "body_size")
    shown = {name: value for name, value in summary(letter).items() if name not in left_out}
    state = {"state": _state(letter) or None}
    for name, value in {**shown, **state, **key, "headers": dict(letter.headers)}.items():
        if value is not None:
            typer.echo(f"{name + ':':16}{printable(str(value), keep=LINE_ENDS)}")
    for one in letter.history:
        typer.echo(f"counted:        delivery {one['delivery']}, {one['at']}: {printable(one['error'])}")
    size = f"{letter.body_size} bytes"
    if body_to is not None:
        typer.echo(f"body ({size}): in {printable(str(body_to))}")
        return
    is_cut = len(letter.body) < (letter.body_size or 0)
    more = f"; its first {len(letter.body)}, --body-to FILE writes all" if is_cut else ""
    body = getincrementaldecoder("utf-8")("backslashreplace").decode(letter.body, final=not is_cut)
    typer.echo(f"body ({size}{more}):\n{printable(body, keep=LINE_ENDS)}")


def _write_body(letters: DeadLetters, letter: DeadLetter, path: Path) -> None:
    number, size, written = letter.dead_letter_id or 0, letter.body_size or 0, 0
    try:
        with path.open("wb") as file:
            while written < size:
                written += file.write(letters.get(number, body_from=written, body_bytes=PART_BYTES).body)
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror or error}") from error


def summary(letter: DeadLetter) -> dict[str, object]:
    """Return a letter's fields without body, headers and envelope."""
    return {name: value for name, value in asdict(letter).items() if name not in ("body", "headers", "envelope")}


def _state(letter: DeadLetter) -> str:
    """Return what became of a letter; empty while it waits."""
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
