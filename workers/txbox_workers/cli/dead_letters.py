"""``txbox dead-letters``: look at parked messages, and send them through again."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from txbox import BrokerError, DeadLetter, DeadLetters
from txbox.dead_letters import LetterNotFound
from txbox_workers.cli.errors import UsageError, mask
from txbox_workers.cli.options import JsonOption, PrefixOption, SchemaOption, UrlOption, database, print_json

__all__ = ["app"]

app = typer.Typer(help="Look at parked messages, and send them through again.", no_args_is_help=True)

SubscriberOption = Annotated[str | None, typer.Option("--subscriber", help="Only this subscriber's.")]


@app.command("list")
def list_letters(
    url: UrlOption = None,
    schema: SchemaOption = None,
    prefix: PrefixOption = None,
    subscriber: SubscriberOption = None,
    redriven: Annotated[bool, typer.Option("--all", help="Also those that were sent through again.")] = False,
    after: Annotated[int, typer.Option(help="Only numbers greater than this: the next page.")] = 0,
    limit: Annotated[int, typer.Option(help="How many, at most.", min=1, max=10_000)] = 100,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, oldest first."""
    place = database(url, schema, prefix)
    with place.engine() as engine:
        letters = DeadLetters(engine, schema=place.schema, prefix=place.prefix).list(
            subscriber, redriven=redriven, after=after, limit=limit
        )
    if as_json:
        print_json([_summary(letter) for letter in letters])
        return
    if not letters:
        typer.echo("no dead letters")
        return
    table = Table("no.", "subscriber", "message", "reason", "attempts", "parked", "error", box=None)
    for letter in letters:
        error = letter.error.splitlines()[0] if letter.error else ""
        parked = f"{letter.parked_at:%Y-%m-%d %H:%M:%S}" if letter.parked_at else ""
        table.add_row(
            str(letter.dead_letter_id),
            letter.subscriber_id,
            letter.message_id,
            letter.reason,
            str(letter.attempts),
            parked,
            error[:100],
        )
    Console(markup=False).print(table)
    if len(letters) == limit:
        typer.echo(f"there may be more: --after {letters[-1].dead_letter_id}")


@app.command()
def show(
    number: Annotated[int, typer.Argument(help="The letter's number, from `txbox dead-letters list`.")],
    url: UrlOption = None,
    schema: SchemaOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one dead letter whole: its error, headers and body."""
    place = database(url, schema, prefix)
    with place.engine() as engine:
        letter = DeadLetters(engine, schema=place.schema, prefix=place.prefix).get(number)
    if as_json:
        print_json(asdict(letter))
        return
    for name, value in _summary(letter).items():
        typer.echo(f"{name + ':':16}{value}")
    typer.echo(f"{'headers:':16}{dict(letter.headers)}")
    typer.echo(f"body ({len(letter.body)} bytes):\n{letter.body.decode('utf-8', 'backslashreplace')}")


@app.command()
def redrive(
    numbers: Annotated[list[int] | None, typer.Argument(help="The letters' numbers.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All that wait (of --subscriber, if given).")] = False,
    url: UrlOption = None,
    schema: SchemaOption = None,
    prefix: PrefixOption = None,
    subscriber: SubscriberOption = None,
    queue_url: Annotated[str | None, typer.Option("--queue", help="Another queue than the letters' own.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Send dead letters back to their queue, under the ids they had.

    Repair what made them fail first. A letter that fails again is parked again, under a new number.
    """
    if bool(numbers) == every:
        raise UsageError("say which letters: their numbers, or --all")
    from txbox_workers.sqs import redrive_to_queue

    place = database(url, schema, prefix)
    sent, failed = [], {}
    with place.engine() as engine:
        letters = DeadLetters(engine, schema=place.schema, prefix=place.prefix)
        for number in numbers or _waiting(letters, subscriber):
            try:
                letters.redrive(number, lambda letter: redrive_to_queue(letter, queue_url=queue_url))
            except (BrokerError, LetterNotFound) as error:
                failed[number] = mask(str(error))
            else:
                sent.append(number)
    if as_json:
        print_json({"redriven": sent, "failed": failed})
    else:
        typer.echo(f"{len(sent)} sent through again")
        for number, why in failed.items():
            typer.echo(f"txbox: dead letter {number}: {why}", err=True)
    return 1 if failed else 0


def _waiting(letters: DeadLetters, subscriber: str | None) -> Iterator[int]:
    after = 0
    while page := letters.list(subscriber, after=after):
        for letter in page:
            after = letter.dead_letter_id or after
            yield after


def _summary(letter: DeadLetter) -> dict[str, object]:
    return {name: value for name, value in asdict(letter).items() if name not in ("body", "headers", "envelope")}
