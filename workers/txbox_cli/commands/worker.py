"""``txbox worker``: run a worker of yours as a process."""

from typing import Annotated

import typer

from txbox.service import STOP_SECONDS
from txbox_cli import importer
from txbox_cli.commands.operate.health import HEALTH_HOST, HealthHostOption, HealthPortOption, health_of
from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.signals import hangup_terminates
from txbox_workers.worker import Worker

HANDLER_PARAMETERS = 2
"""Session and message."""


def worker(
    target: Annotated[str, typer.Argument(metavar="MODULE:NAME", help="A worker, or a function that returns one.")],
    stop_seconds: Annotated[
        float, typer.Option(help="How long to drain after SIGTERM or Ctrl-C.", min=0)
    ] = STOP_SECONDS,
    health_port: HealthPortOption = None,
    health_host: HealthHostOption = HEALTH_HOST,
) -> None:
    """Run a worker until SIGTERM or Ctrl-C, then drain it.

    MODULE is imported with the current directory on the path, so `txbox worker billing:worker` runs the `worker` of
    billing.py. A second signal ends the process at once; whatever it had taken will be delivered again.

    Exit status 1 if draining took longer than allowed.
    """
    found = load(target)
    works = f"{found.subscriber_id} works on {found.source.name}; Ctrl-C drains and stops"
    with hangup_terminates(), health_of(found, health_host, health_port) as healthy:

        def started() -> None:
            healthy()
            typer.echo(works)

        drained = found.run(stop_seconds, started=started)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.counts.items())) or "no deliveries"
    typer.echo(f"stopped: {counts}")
    if not drained:
        raise CommandFailed(f"not drained within {stop_seconds:g} s; the rest will be delivered again")


def load(target: str) -> Worker:
    """Import a worker.

    Args:
        target: MODULE:NAME.

    Raises:
        UsageError: there is no such module or name, or it is not a worker.
        CommandFailed: the module is there, and its own code raised.
    """
    found = importer.load(target, lambda value: isinstance(value, Worker), such_as="billing:worker")
    if not isinstance(found.value, Worker):
        raise UsageError(f"{found.what}, not a worker; {_instead(found)}")
    return found.value


def _instead(found: importer.Imported) -> str:
    """Say what to do instead: run a worker that is there, or make one of what looks like a handler."""
    module_name = found.module.__name__
    if found.fitting:
        return "run " + " or ".join(f"`txbox worker {module_name}:{worker}`" for worker in found.fitting)
    if len(found.wanted) == HANDLER_PARAMETERS:
        subscriber = module_name.rpartition(".")[2]
        return (
            f"write `worker = SqsWorker(queue_url, inbox=Inbox({subscriber!r}), engine=engine, handler={found.name})` "
            f"there, and run `txbox worker {module_name}:worker`"
        )
    return "name a worker, or a function without parameters that returns one"
