"""``txbox dead-letters``: look at parked messages, and send them through again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from txbox import BrokerError, DeadLetter, DeadLetters, LetterNotFound
from txbox_workers.cli.errors import UsageError, explain
from txbox_workers.cli.options import (
    JsonOption,
    PrefixOption,
    SchemaOption,
    UrlOption,
    database,
    require_queue_url,
)
from txbox_workers.cli.output import print_json, print_table, printable

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["app"]

app = typer.Typer(help="Look at parked messages, and send them through again.")

ERROR_CHARACTERS = 100
"""Of an error in the list; `show` has all of it."""

LINE_ENDS = "\n\t"

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
    print_table(
        ("no.", "subscriber", "message", "reason", "attempts", "parked", "error"),
        [
            (
                str(letter.dead_letter_id),
                letter.subscriber_id,
                letter.message_id,
                letter.reason,
                str(letter.attempts),
                f"{letter.parked_at:%Y-%m-%d %H:%M:%S}",
                letter.error.partition("\n")[0][:ERROR_CHARACTERS],
            )
            for letter in letters
        ],
    )
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
    for name, value in {**_summary(letter), "headers": dict(letter.headers)}.items():
        if value is not None:
            typer.echo(f"{name + ':':16}{printable(str(value), keep=LINE_ENDS)}")
    body = letter.body.decode("utf-8", "backslashreplace")
    typer.echo(f"body ({len(letter.body)} bytes):\n{printable(body, keep=LINE_ENDS)}")


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
    if queue_url is not None:
        require_queue_url(queue_url)
    place = database(url, schema, prefix)
    sent, failed = [], {}
    with place.engine() as engine, _sender(queue_url) as send:
        letters = DeadLetters(engine, schema=place.schema, prefix=place.prefix)
        for number in numbers or list(_waiting(letters, subscriber)):
            try:
                letters.redrive(number, send)
            except LetterNotFound as error:
                failed[number] = explain(error)
            except BrokerError as error:
                failed[number] = f"dead letter {number} was not sent: {explain(error)}"
            else:
                sent.append(number)
    if as_json:
        print_json({"redriven": sent, "failed": failed})
    else:
        typer.echo(f"{len(sent)} sent through again")
        for why in failed.values():
            typer.echo(f"txbox: {why}", err=True)
    return 1 if failed else 0


@contextmanager
def _sender(queue_url: str | None) -> Iterator[Callable[[DeadLetter], None]]:
    """Lend a way to send letters to their own queues, or to this one; making a client takes longer than sending."""
    from txbox_workers.sqs import redrive_to_queue, sqs_client

    clients: dict[str, SQSClient] = {}

    def send(letter: DeadLetter) -> None:
        target = queue_url or letter.source
        if target not in clients:
            clients[target] = sqs_client(target)
        redrive_to_queue(letter, client=clients[target], queue_url=target)

    try:
        yield send
    finally:
        for client in clients.values():
            client.close()


def _waiting(letters: DeadLetters, subscriber: str | None) -> Iterator[int]:
    after = 0
    while page := letters.list(subscriber, after=after):
        for letter in page:
            after = letter.dead_letter_id or after
            yield after


def _summary(letter: DeadLetter) -> dict[str, object]:
    return {name: value for name, value in asdict(letter).items() if name not in ("body", "headers", "envelope")}
