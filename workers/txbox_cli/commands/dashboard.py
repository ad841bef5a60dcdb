"""``txbox dashboard``: serve pages that show a database."""

import ipaddress
import secrets
import socket
from typing import Annotated, Any

import typer

from txbox_cli import importer
from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.options import DatabaseOptions
from txbox_cli.signals import hangup_terminates

PORT = 8790

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")

CONNECTIONS = 8
"""The most pages read at the same time; others wait for their turn."""


def dashboard(
    db: DatabaseOptions,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 is all of this machine's, and takes a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 is any that is free.", min=0, max=65535)] = PORT,
    allow_actions: Annotated[
        bool,
        typer.Option("--allow-actions", help="Redrive and discard dead letters, pause and resume. Takes a token."),
    ] = False,
    show_bodies: Annotated[
        bool, typer.Option("--show-bodies", help="Show the bodies and headers of messages; they may hold secrets.")
    ] = False,
    redact: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="A function that is given each body, header and error (txbox_dashboard.Sensitive) and returns what to "
            "show.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", metavar="NAME", help="A further name by which browsers reach it. Repeatable."),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="ADDRESS",
            help="A proxy whose X-Forwarded-Proto and X-Forwarded-For are believed, as an address or a network, "
            "10.0.0.0/8; without one, those of this machine are. Repeatable.",
        ),
    ] = None,
) -> None:
    """Serve pages that show what is processed, sent, parked and kept, live, until SIGTERM or Ctrl-C.

    Everything is read from the database; a role that may only read is enough. Without more, it listens on this machine
    alone, changes nothing, and shows no body and no header of any message.

    With --allow-actions, or another --host, a person has to give a token: that of the variable TXBOX_DASHBOARD_TOKEN,
    or else one that is made and printed at the start.

    To have it in a service of yours: app.mount("/txbox", dashboard(engine)), from txbox_dashboard.
    """
    # Where these are missing, the error names the extra that brings them.
    from txbox_cli.http_server import serve
    from txbox_cli.settings import Settings
    from txbox_dashboard import dashboard as make_dashboard

    proxies = [_checked_proxy(each) for each in trusted_proxy] if trusted_proxy else None
    on_loopback = _is_loopback(host)
    given = Settings().dashboard_token
    token = given.get_secret_value() if given else None
    made = token is None and (allow_actions or not on_loopback)
    if made:
        token = secrets.token_urlsafe(24)
    hook = None if redact is None else _load(redact)
    names = [*LOOPBACK_NAMES, *(allowed_host or ())] if on_loopback else (allowed_host or None)
    with (
        db.engine(pool_size=CONNECTIONS, max_overflow=0, hide_parameters=True) as engine,
        _listening(host, port) as listener,
    ):
        app = make_dashboard(
            engine,
            schema=db.schema,
            prefix=db.prefix,
            allow_actions=allow_actions,
            token=token,
            show_bodies=show_bodies,
            redact=hook,
            allowed_hosts=names,
        )
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"http://{shown}:{listener.getsockname()[1]}/ shows {db.url.database}; Ctrl-C stops")
        if made:
            typer.echo(f"token: {token}")
        with hangup_terminates():
            serve(app, listener, trusted_proxies=proxies)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _checked_proxy(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise UsageError(
            f"--trusted-proxy must be an address or a network, such as 10.0.0.7 or 10.0.0.0/8, not {text!r}"
        ) from error


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()  # before the address is printed: whoever reads it may connect
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise CommandFailed(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; try another --port"
        ) from error
    return listener


def _load(target: str) -> Any:
    found = importer.load(target, callable, such_as="shop:redact")
    if not callable(found.value):
        raise UsageError(f"{found.what}, not a function that takes a text and returns one")
    return found.value
