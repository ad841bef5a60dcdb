"""``txbox relay``: send what the outbox holds, as a process."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Annotated

import typer

from txbox.errors import ExtraMissing, InvalidConfiguration
from txbox.relay import AsyncPublisher, Publisher, Relay
from txbox.relay.async_sender import CONCURRENCY
from txbox.relay.poller import IDLE_SECONDS
from txbox.relay.publisher import is_async
from txbox.relay.relay import BATCH_SIZE, MAX_ATTEMPTS, MOST_SENDERS, PUBLISH_TIMEOUT_SECONDS
from txbox.service import STOP_SECONDS
from txbox.tracing import Tracing
from txbox_cli import importer
from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.health import HEALTH_HOST, HealthHostOption, HealthPortOption, health_of
from txbox_cli.options import DatabaseTarget, PrefixOption, SchemaOption, UrlOption, database, read_span
from txbox_cli.signals import hangup_terminates
from txbox_workers.brokers import GROUP, load

SENDERS = 4

SPARE_CONNECTIONS = 3
"""In addition to one for each sender: to poll, to listen and to report."""

ASYNC_CONNECTIONS = 3
"""Also, where a publisher is async: to claim, to settle, and to claim while an older claim ends."""

OF_ANY_RELAY = {"target", "stop_seconds", "health_port", "health_host"}
"""The parameters of the command that a relay which a module has made takes, too."""


def relay(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:NAME",
            help="A relay, publishers by scheme, or a function that returns either. Without it: SQS, SNS, EventBridge, "
            "and other brokers that are installed.",
            show_default=False,
        ),
    ] = None,
    url: UrlOption = None,
    schema: SchemaOption = None,
    prefix: PrefixOption = None,
    senders: Annotated[
        int | None,
        typer.Option(
            help=f"Threads that send, each with a connection; {SENDERS} by default. While destinations hang, there are "
            f"up to {MOST_SENDERS} times as many.",
            min=1,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help=f"Calls of async publishers under way at once; {CONCURRENCY} by default.", min=1),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help=f"Messages of one transaction; {BATCH_SIZE} by default.", min=1)
    ] = None,
    max_attempts: Annotated[
        int | None,
        typer.Option(
            help=f"Refusals after which a message becomes a dead letter; {MAX_ATTEMPTS} by default, 0 for never.", min=0
        ),
    ] = None,
    keep_sent: Annotated[
        str | None,
        typer.Option(metavar="SPAN", help="Keep what was sent for so long: 12h, 7d. Without it, it is forgotten."),
    ] = None,
    publish_timeout_seconds: Annotated[
        float | None,
        typer.Option(
            help=f"How long one call of a publisher may take; {PUBLISH_TIMEOUT_SECONDS:g} by default. After that, "
            "other relays may send its messages.",
            min=1,
        ),
    ] = None,
    no_listen: Annotated[
        bool,
        typer.Option("--no-listen", help=f"Look for new messages only, every {IDLE_SECONDS:g} s while there are none."),
    ] = False,
    traces: Annotated[
        bool,
        typer.Option(
            "--traces",
            help="Make spans of OpenTelemetry, by the provider that is set up in this process: "
            "`opentelemetry-instrument txbox relay --traces`.",
        ),
    ] = False,
    stop_seconds: Annotated[
        float, typer.Option(help="How long to finish what is being sent after SIGTERM or Ctrl-C.", min=0)
    ] = STOP_SECONDS,
    health_port: HealthPortOption = None,
    health_host: HealthHostOption = HEALTH_HOST,
) -> None:
    """Send what the outbox holds until SIGTERM or Ctrl-C, then finish what was begun.

    Run as many as you like, on any machine: they share the work, each key keeps its order, and when one is killed, the
    others send what it had in its hands, under the same message ids.

    For destinations of your own, give publishers by their scheme. With this in shop.py, `txbox relay shop:publishers`
    sends what was published to kafka:purchases, and to SQS, SNS and EventBridge as well:

    \b
    publishers = {"kafka": KafkaPublisher()}

    A publisher whose send is `async def` is awaited: hundreds of slow destinations are sent to at once.

    MODULE is imported with the current directory on the path. A Relay that you have made there has its own database and
    settings. A second signal ends the process at once; what it was sending is sent again by the next one.

    Exit status 1 if finishing took longer than allowed.
    """
    given = [name for name, value in locals().items() if value is not None and value is not False]
    span = None if keep_sent is None else read_span("--keep-sent", keep_sent)
    found = None if target is None else _load(target)
    if isinstance(found, Relay):
        if refused := [f"--{name.replace('_', '-')}" for name in given if name not in OF_ANY_RELAY]:
            raise UsageError(f"{target} is a relay, which has its own settings; leave out {', '.join(refused)}")
        _run(found, stop_seconds, f"{target} is at work", health_host, health_port)
        return
    db = database(url, schema, prefix)
    publishers = _publishers(found)
    tracing = _tracing() if traces else None
    senders = senders or SENDERS
    most = MOST_SENDERS * senders
    size = senders + SPARE_CONNECTIONS + (ASYNC_CONNECTIONS if any(map(is_async, publishers.values())) else 0)
    with db.engine(pool_size=size, max_overflow=most - senders, hide_parameters=True) as engine:
        made = Relay(
            engine,
            publishers,
            schema=db.schema,
            prefix=db.prefix,
            senders=senders,
            max_senders=most,
            concurrency=concurrency or CONCURRENCY,
            batch_size=batch_size or BATCH_SIZE,
            max_attempts=MAX_ATTEMPTS if max_attempts is None else max_attempts or None,
            keep_sent=span,
            publish_timeout_seconds=publish_timeout_seconds or PUBLISH_TIMEOUT_SECONDS,
            listen=not no_listen,
            tracing=tracing,
        )
        _run(made, stop_seconds, _sends(publishers, db, keep_sent), health_host, health_port)


def _run(relay: Relay, stop_seconds: float, what: str, health_host: str, health_port: int | None) -> None:
    with hangup_terminates(), health_of(relay, health_host, health_port) as healthy:

        def started() -> None:
            healthy()
            typer.echo(f"{what}; Ctrl-C finishes and stops")

        finished = relay.run(stop_seconds, started=started)
    typer.echo(f"stopped: {relay.sent:,} sent, {relay.failed:,} refused")
    if not finished:
        raise CommandFailed(f"not finished within {stop_seconds:g} s; what was being sent may be sent again")


def _load(target: str) -> Relay | Mapping[str, Publisher | AsyncPublisher]:
    """Import a relay or publishers.

    Raises:
        UsageError: there is no such module or name, or it is neither.
        CommandFailed: the module exists, and its own code raised.
    """
    found = importer.load(target, _fits, such_as="shop:publishers")
    if isinstance(found.value, Relay):
        return found.value
    if isinstance(found.value, Mapping) and _fits(found.value):
        return found.value
    raise UsageError(f"{found.what}, neither a relay nor publishers by scheme; {_instead(found)}")


def _fits(value: object) -> bool:
    if isinstance(value, Relay):
        return True
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(scheme, str) and _is_publisher(publisher) for scheme, publisher in value.items())
    )


def _is_publisher(value: object) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "send", None))


def _instead(found: importer.Imported) -> str:
    module_name = found.module.__name__
    if found.fitting:
        return "run " + " or ".join(f"`txbox relay {module_name}:{name}`" for name in found.fitting)
    if _is_publisher(found.value):
        return f'write `publishers = {{"scheme": {found.name}}}` there, and run `txbox relay {module_name}:publishers`'
    if isinstance(found.value, Mapping):
        return f'it has to be {{"scheme": publisher, …}}, each publisher with a method send{_but(found.value)}'
    return "name one, or a function without parameters that returns one"


def _but(publishers: Mapping[object, object]) -> str:
    """Return which of these are not publishers, if any."""
    unnamed = [f"{scheme!r} is no text" for scheme in publishers if not isinstance(scheme, str)]
    unsent = [f"that of {scheme!r} is {_kind(one)}" for scheme, one in publishers.items() if not _is_publisher(one)]
    return "".join(f"; {why}" for why in [*unnamed, *unsent]) if publishers else "; it is empty"


def _kind(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object made of it"
    return f"{_article(type(value).__name__)} without one"


def _article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _publishers(own: Mapping[str, Publisher | AsyncPublisher] | None) -> Mapping[str, Publisher | AsyncPublisher]:
    """Return the installed brokers' publishers and these.

    Skip a broker that cannot be imported, for what is sent to it waits; and one whose extra is missing, unless none is
    left.
    """
    found: dict[str, Publisher | AsyncPublisher] = {}
    missing = None
    for entry in sorted(entry_points(group=GROUP)):
        try:
            found |= load(entry).publishers()
        except ExtraMissing as error:
            missing = error
        except InvalidConfiguration as error:
            typer.echo(f"txbox: {entry.name}: {error}; what is sent to it waits", err=True)
    if missing is not None and not (found or own):
        raise missing
    return {**found, **(own or {})}


def _tracing() -> Tracing:
    try:
        from txbox.instrumentation.opentelemetry_tracing import OpenTelemetryTracing
    except ImportError as error:
        raise UsageError(f"--traces: {error}") from error
    return OpenTelemetryTracing()


def _sends(publishers: Mapping[str, Publisher | AsyncPublisher], db: DatabaseTarget, keep_sent: str | None) -> str:
    kept = "" if keep_sent is None else f", keeping what was sent for {keep_sent}"
    return f"sending from {db.url.database} on {db.url.host or 'this machine'} to {', '.join(publishers)}{kept}"
