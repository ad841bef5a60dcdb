"""A worker without Python code: a queue, a subscriber and an effect in SQL."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from txbox import Inbox, InvalidConfiguration, Outbox, SqlEffect
from txbox.messages.destinations import INBOX
from txbox_cli.errors import UsageError
from txbox_cli.options import PrefixOption, PublishToOption, SchemaOption, UrlOption, checked_queue, database
from txbox_workers.brokers import broker_of
from txbox_workers.options import ValidOptions
from txbox_workers.worker import Worker

NEEDED = ("queue", "subscriber", "apply", "fields")


@dataclass(frozen=True, slots=True)
class SqlWorker:
    """The options of a worker. Nothing is checked before the worker is made."""

    given: Mapping[str, Any]  # by name, only those that were given

    @contextmanager
    def made(self) -> Iterator[Worker]:
        """Make the worker, with an engine sized for its threads.

        Raises:
            UsageError: options are missing, or cannot work.
        """
        more = dict(self.given)
        if str(more.get("queue")).startswith(INBOX):
            more.setdefault("subscriber", more["queue"].removeprefix(INBOX))
        missing = [f"--{name}" for name in NEEDED if name not in more]
        if missing:
            wanted = "--queue, --subscriber, --apply and --fields"
            raise UsageError(
                f"give either MODULE:NAME, such as billing:worker, or {wanted}; there is no {', '.join(missing)}"
            )
        queue, subscriber, apply, fields = (more.pop(name) for name in NEEDED)
        to = more.pop("publish_to", None)
        db = database(*(more.pop(name, None) for name in ("url", "schema", "prefix")))
        with db.engine(pool_size=more.get("threads", 1) + 1, hide_parameters=True) as engine:
            try:
                inbox = Inbox(subscriber, schema=db.schema, prefix=db.prefix)
                outbox = None if to is None else Outbox(schema=db.schema, prefix=db.prefix)
                effect = SqlEffect(apply, fields=fields, outbox=outbox, destination=to)
                visibility = more.pop("visibility_seconds", None)
                worker = broker_of(queue).worker(
                    queue, visibility_seconds=visibility, inbox=inbox, engine=engine, effect=effect, **more
                )
            except InvalidConfiguration as error:
                raise UsageError(str(error)) from error
            yield worker


def worker_option(name: str, default: str | None = None, *, needs: str = "--queue") -> Any:
    """Return a worker's option for typer, with the range, text and default of the field of ``ValidOptions``.

    Args:
        default: shown in place of the field's default, in words.
        needs: the option without which this one has no effect.
    """
    (field,) = (field for field in dataclasses.fields(ValidOptions) if field.name == name)
    by_default = default or f"{field.default:g} by default"
    text, least, most = (field.metadata[key] for key in ("text", "least", "most"))
    return typer.Option(help=f"With {needs}: {text}; {by_default}.", min=least, max=most)


def sql_worker(
    queue: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="In place of MODULE:NAME: the queue, of SQS or scheme:rest, of a worker that applies SQL.",
            callback=checked_queue,
        ),
    ] = None,
    subscriber: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Who processes its messages: the name in the inbox; that of inbox:NAME by default."
        ),
    ] = None,
    apply: Annotated[
        Path | None,
        typer.Option(metavar="FILE.sql", help="The effect: statements over the relation fresh_event."),
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option(
            metavar="FIELDS",
            help="The columns of fresh_event: 'customer_id text at /customer/id not null, cents bigint'.",
        ),
    ] = None,
    publish_to: PublishToOption = None,
    url: UrlOption = None,
    schema: SchemaOption = None,
    prefix: PrefixOption = None,
    threads: Annotated[int | None, worker_option("threads")] = None,
    batch_size: Annotated[int | None, worker_option("batch_size")] = None,
    prefetch: Annotated[int | None, worker_option("prefetch", "0 by default, or 1000 with a larger batch size")] = None,
    gather_seconds: Annotated[float | None, worker_option("gather_seconds", needs="--prefetch")] = None,
    visibility_seconds: Annotated[
        int | None,
        typer.Option(help="With --queue: how long a killed worker's messages wait for another; 30 by default.", min=1),
    ] = None,
    max_attempts: Annotated[int | None, worker_option("max_attempts")] = None,
) -> SqlWorker:
    return SqlWorker({name: value for name, value in locals().items() if value is not None})
