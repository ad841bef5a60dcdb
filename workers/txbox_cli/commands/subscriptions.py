"""``txbox subscriptions``: who gets the messages of a topic."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from txbox_cli.errors import CommandFailed
from txbox_cli.options import Commands, DatabaseOptions, DatabaseTarget, JsonOption
from txbox_cli.output import print_json, print_table, printable

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from txbox.outbox import Subscriptions

app = Commands(help="Add and remove the subscribers of topics.")

TopicArgument = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The topic, with or without topic: before it.", show_default=False)
]
SubscriberArgument = Annotated[
    str, typer.Argument(metavar="SUBSCRIBER", help="Who gets its messages.", show_default=False)
]


@app.command(short_help="Subscribe to a topic.")
def add(topic: TopicArgument, subscriber: SubscriberArgument, db: DatabaseOptions, as_json: JsonOption = False) -> None:
    """Subscribe to a topic: what is published to it from now on goes to inbox:SUBSCRIBER too."""
    with db.engine() as engine:
        is_new = _subscriptions(engine, db).add(topic, subscriber)
    done = "subscribed" if is_new else "already subscribed"
    _say(topic, subscriber, done, as_json=as_json, subscribed=True, new=is_new)


@app.command(short_help="End a subscription.")
def remove(
    topic: TopicArgument, subscriber: SubscriberArgument, db: DatabaseOptions, as_json: JsonOption = False
) -> None:
    """End a subscription. The subscriber still gets what was published before.

    Exit status 1 if there is none.
    """
    with db.engine() as engine:
        if not _subscriptions(engine, db).remove(topic, subscriber):
            raise CommandFailed(f"{subscriber} has not subscribed to {topic}; `txbox subscriptions list` shows who has")
    _say(topic, subscriber, "unsubscribed", as_json=as_json, subscribed=False)


@app.command("list", short_help="List the subscribers of all topics.")
def list_subscriptions(db: DatabaseOptions, as_json: JsonOption = False) -> None:
    """List the subscribers of all topics."""
    with db.engine() as engine:
        found = _subscriptions(engine, db).list()
    if as_json:
        print_json([asdict(one) for one in found])
    elif not found:
        typer.echo("no subscriptions; `txbox subscriptions add TOPIC SUBSCRIBER` adds one")
    else:
        since = [f"{one.added_at:%Y-%m-%d %H:%M:%S}" if one.added_at else "" for one in found]
        rows = [(one.topic, one.subscriber_id, moment) for one, moment in zip(found, since, strict=True)]
        print_table(("topic", "subscriber", "since"), rows)


def _subscriptions(engine: "Engine", db: DatabaseTarget) -> "Subscriptions":
    from txbox.outbox import Subscriptions

    return Subscriptions(engine, schema=db.schema, prefix=db.prefix)


def _say(topic: str, subscriber: str, done: str, *, as_json: bool, **state: bool) -> None:
    from txbox.messages.destinations import TOPIC

    name = topic.removeprefix(TOPIC)
    if as_json:
        print_json({"topic": name, "subscriber_id": subscriber, **state})
    else:
        typer.echo(printable(f"{done}: {subscriber} to {TOPIC}{name}"))
