"""``txbox dev``: a Postgres and a local AWS of your own while you work."""

import re
import shlex
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.output import print_json


def dev(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", file_okay=False, help="Keep the database in this directory; without it, it goes when you stop."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="The database's port; without it, a free one.", min=1, max=65_535)
    ] = None,
    aws_port: Annotated[
        int | None, typer.Option(help="The local AWS's port; without it, a free one.", min=1, max=65_535)
    ] = None,
    queues: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            help="Create this SQS queue; its URL is in QUEUE_URL_ and its name, as in QUEUE_URL_PURCHASES. Repeatable; "
            "QUEUE_URL is the first one's URL.",
        ),
    ] = None,
    no_aws: Annotated[bool, typer.Option("--no-aws", help="PostgreSQL alone.")] = False,
    no_tables: Annotated[
        bool, typer.Option("--no-tables", help="Create no tables: your own migrations do, by alembic or Django.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the environment as JSON.")] = False,
) -> None:
    """Start a PostgreSQL and a local AWS, create the tables, print the environment to export, wait for Ctrl-C.

    The local AWS answers for SQS, SNS, EventBridge, DynamoDB and Step Functions. Both servers listen on 127.0.0.1 only.
    In another terminal, paste the printed lines, or `source` a file that they were written to; then services, `txbox
    worker`, `txbox relay` and `txbox status` find both, and so does boto3: a topic, a table or a state machine of yours
    is made with it. If this process is killed, or its terminal closed, both servers end with it.
    """
    if no_aws and (queues or aws_port is not None):
        raise UsageError("--no-aws starts no AWS: leave out --queue and --aws-port")
    from txbox_local.services import DevServices

    for name in queues or ():
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,80}|[A-Za-z0-9_-]{1,75}\.fifo", name):
            raise UsageError(f"--queue: SQS allows letters, digits, - and _, and .fifo at the end, not {name!r}")
    variables = _variables(queues or ())
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with DevServices(directory=data, port=port, aws=not no_aws, aws_port=aws_port) as services:
        if not no_tables:
            _create_tables(services.postgres.url)
        environment = dict(services.environment())
        unset, queue_urls = (False, {}) if no_aws else _create_queues(environment, queues or ())
        if queue_urls:
            environment["QUEUE_URL"] = next(iter(queue_urls.values()))
            environment |= {variables[name]: url for name, url in queue_urls.items()}
        if as_json:
            print_json({"environment": environment, "queues": queue_urls})
        else:
            for name, value in environment.items():
                typer.echo(f"export {name}={shlex.quote(value)}")
            if unset:
                typer.echo("unset AWS_ENDPOINT_URL_SQS")
        where = "is kept" if data else "goes when you stop"
        typer.echo(f"ready; the data in {services.postgres.directory} {where}; Ctrl-C stops", err=True)
        stopping.wait()
    typer.echo("stopped", err=True)


def _create_queues(environment: dict[str, str], names: Iterable[str]) -> tuple[bool, dict[str, str]]:
    """Create queues in the local AWS. Return whether AWS_ENDPOINT_URL_SQS has to be unset, and their URLs by name."""
    from txbox_aws.sqs import create_queue
    from txbox_cli.settings import lead_boto3_to

    unset = lead_boto3_to(environment)
    return unset, {name: create_queue(name) for name in names}


def _create_tables(url: str) -> None:
    from txbox_migrations import MigrationError, upgrade_database

    try:
        upgrade_database(url)
    except MigrationError as error:
        raise CommandFailed(f"{error}. Where your own migrations make the tables, give --no-tables") from error


def _variables(queues: Iterable[str]) -> dict[str, str]:
    """Return the variable that holds each queue's URL.

    Raises:
        UsageError: two queues would have the same variable.
    """
    variables: dict[str, str] = {}
    for name in dict.fromkeys(queues):
        variable = f"QUEUE_URL_{re.sub('[^A-Z0-9]', '_', name.upper())}"
        if (other := next((earlier for earlier in variables if variables[earlier] == variable), None)) is not None:
            raise UsageError(f"--queue: {other} and {name} would both be {variable}; rename one of them")
        variables[name] = variable
    return variables
