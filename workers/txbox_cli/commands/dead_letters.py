"""``txbox dead-letters``: look at parked messages, and send them through again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from txbox import BrokerError, DeadLetter, DeadLetters, LetterNotFound
from txbox.errors import NotSendable
from txbox.outbox.outbox import RELAY_SUBSCRIBER, Outbox
from txbox.outbox.status import relays_at_work
from txbox_cli.errors import UsageError, explain
from txbox_cli.options import JsonOption, PrefixOption, SchemaOption, UrlOption, database, require_queue_url
from txbox_cli.output import print_json, print_table, printable

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["app"]

app = typer.Typer(help="Look at parked messages, and send them through again.")

ERROR_CHARACTERS = 100
"""Of an error in the list; `show` has all of it."""

LINE_ENDS = "\n\t"

SubscriberOption = Annotated[str | None, typer.Option("--subscriber", help="Only this subscriber's.")]
DestinationOption = Annotated[
    str | None, typer.Option("--destination", help="Only those that a relay could not send there.")
]


@app.command("list")
def list_letters(
    url: UrlOption = None,
    schema: SchemaOption = None,
    prefix: PrefixOption = None,
    subscriber: SubscriberOption = None,
    destination: DestinationOption = None,
    redriven: Annotated[bool, typer.Option("--all", help="Also those that were sent through again.")] = False,
    after: Annotated[int, typer.Option(help="Only numbers greater than this: the next page.")] = 0,
    limit: Annotated[int, typer.Option(help="How many, at most.", min=1, max=10_000)] = 100,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, oldest first.

    Those of a relay were never received; their subscriber is txbox:outbox: and the destination.
    """
    subscriber = _subscriber(subscriber, destination)
    db = database(url, schema, prefix)
    with db.engine() as engine:
        letters = DeadLetters(engine, schema=db.schema, prefix=db.prefix).list(
            subscriber, redriven=redriven, after=after, limit=limit
        )
    if as_json:
        print_json([_summary(letter) for letter in letters])
        return
    if not letters:
        typer.echo("no dead letters")
        return
    more = ("redriven",) if redriven else ()
    print_table(
        ("no.", "subscriber", "message", "reason", "attempts", "parked", *more, "error"),
        [
            (
                str(letter.dead_letter_id),
                letter.subscriber_id,
                letter.message_id,
                letter.reason,
                str(letter.attempts),
                f"{letter.parked_at:{_TIME}}",
                *(f"{letter.redriven_at:{_TIME}}" if letter.redriven_at else "" for _ in more),
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
    db = database(url, schema, prefix)
    with db.engine() as engine:
        letter = DeadLetters(engine, schema=db.schema, prefix=db.prefix).get(number)
    if as_json:
        print_json(asdict(letter))
        return
    key = {"key": letter.envelope["outbox"].get("key")} if _is_of_relay(letter) else {}
    summary = {name: value for name, value in _summary(letter).items() if name != "history"}
    for name, value in {**summary, **key, "headers": dict(letter.headers)}.items():
        if value is not None:
            typer.echo(f"{name + ':':16}{printable(str(value), keep=LINE_ENDS)}")
    for one in letter.history:
        typer.echo(f"counted:        delivery {one['delivery']}, {one['at']}: {printable(one['error'])}")
    body = letter.body.decode("utf-8", "backslashreplace")
    typer.echo(f"body ({len(letter.body)} bytes):\n{printable(body, keep=LINE_ENDS)}")


@app.command(short_help="Send dead letters through again.")
def redrive(
    numbers: Annotated[list[int] | None, typer.Argument(help="The letters' numbers.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All that wait (of --subscriber or --destination, if given).")
    ] = False,
    url: UrlOption = None,
    schema: SchemaOption = None,
    prefix: PrefixOption = None,
    subscriber: SubscriberOption = None,
    destination: DestinationOption = None,
    queue_url: Annotated[str | None, typer.Option("--queue", help="Another queue than the letters' own.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Send dead letters back to their queue, under the ids they had.

    Those that a relay could not send are put into the outbox again, under the ids, keys and headers they had, behind
    what their keys have now. A relay has to be running to send them.

    Repair what made them fail first. A letter that fails again is parked again, under a new number.
    """
    if bool(numbers) == every:
        raise UsageError("say which letters: their numbers, or --all")
    if queue_url is not None:
        require_queue_url(queue_url)
    subscriber = _subscriber(subscriber, destination)
    db = database(url, schema, prefix)
    sent, published, failed = [], 0, {}
    with db.engine() as engine, _sender(queue_url) as send:
        letters = DeadLetters(engine, schema=db.schema, prefix=db.prefix)
        outbox = Outbox(schema=db.schema, prefix=db.prefix)
        for number in dict.fromkeys(numbers) if numbers else list(_waiting(letters, subscriber)):
            try:
                of_relay = _is_of_relay(letters.get(number))
                if of_relay and queue_url is not None:
                    failed[number] = f"dead letter {number} was never sent, so it has no queue; leave out --queue"
                    continue
                if of_relay:
                    letters.republish(number, outbox)
                else:
                    letters.redrive(number, send)
            except LetterNotFound as error:
                failed[number] = explain(error)
            except (BrokerError, NotSendable) as error:
                failed[number] = f"dead letter {number} was not sent: {explain(error)}"
            else:
                sent.append(number)
                published += of_relay
        unattended = published and relays_at_work(engine, schema=db.schema, prefix=db.prefix) == 0
    if as_json:
        print_json({"redriven": sent, "failed": failed})
    else:
        for line in _redriven(len(sent) - published, published):
            typer.echo(line)
        for why in failed.values():
            typer.echo(f"txbox: {why}", err=True)
    if unattended:
        typer.echo("txbox: no relay is at work; start one: txbox relay", err=True)
    return 1 if failed else 0


@contextmanager
def _sender(queue_url: str | None) -> Iterator[Callable[[DeadLetter], None]]:
    """Give a function that sends letters to their own queues, or to this one; it makes one client for each queue."""
    clients: dict[str, SQSClient] = {}

    def send(letter: DeadLetter) -> None:
        from txbox_aws.sqs import redrive_to_queue, sqs_client

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


def _subscriber(subscriber: str | None, destination: str | None) -> str | None:
    """Return the subscriber that is meant; letters of a relay name the destination in its place."""
    if subscriber is not None and destination is not None:
        raise UsageError("letters have a subscriber or, from a relay, a destination: give one of the options")
    return subscriber if destination is None else f"{RELAY_SUBSCRIBER}:{destination}"


def _redriven(sent: int, published: int) -> Iterator[str]:
    """Say what became of letters: sent to their queues, or put where a relay takes them up."""
    if sent or not published:
        yield f"{sent} sent through again"
    if published:
        yield f"{published} put into the outbox again; a relay sends {'it' if published == 1 else 'them'}"


def _is_of_relay(letter: DeadLetter) -> bool:
    return "outbox" in letter.envelope


_TIME = "%Y-%m-%d %H:%M:%S"


def _summary(letter: DeadLetter) -> dict[str, object]:
    return {name: value for name, value in asdict(letter).items() if name not in ("body", "headers", "envelope")}
