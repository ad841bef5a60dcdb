"""``txbox dev``: a Postgres and an SQS of your own, for as long as you work."""

import os
import shlex
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from txbox_workers.cli.options import print_json

__all__ = ["dev"]


def dev(
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Keep the database in this directory; without it, it goes when you stop."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="The database's port; without it, a free one.")] = None,
    queues: Annotated[list[str] | None, typer.Option("--queue", help="Create this SQS queue. Repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the environment as JSON.")] = False,
) -> None:
    """Start a PostgreSQL and a local SQS, create the tables, print the environment to export, wait for Ctrl-C.

    Both listen on 127.0.0.1 only. In another terminal, paste the printed lines; then services, `txbox worker` and
    `txbox status` find both. If this process is killed, both servers end with it.
    """
    from txbox_migrations import upgrade_database
    from txbox_workers.embedded import DevServices
    from txbox_workers.sqs import create_queue

    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with DevServices(directory=data, port=port) as services:
        upgrade_database(services.postgres.url)
        environment = dict(services.environment())
        os.environ.update(environment)  # boto3's way to be told where SQS is
        queue_urls = {name: create_queue(name) for name in queues or ()}
        if as_json:
            print_json({"environment": environment, "queues": queue_urls})
        else:
            for name, value in environment.items():
                typer.echo(f"export {name}={shlex.quote(value)}")
            for name, url in queue_urls.items():
                typer.echo(f"# queue {name}: {url}")
        where = "is kept" if data else "goes when you stop"
        typer.echo(f"ready; the data in {services.postgres.directory} {where}; Ctrl-C stops", err=True)
        stopping.wait()
    typer.echo("stopped", err=True)
