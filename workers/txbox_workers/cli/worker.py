"""``txbox worker``: run a worker of yours as a process."""

import inspect
from typing import Annotated

import typer

from txbox_workers.cli.errors import CommandFailed, UsageError
from txbox_workers.cli.named import find, own_code_of
from txbox_workers.worker import STOP_SECONDS, Worker

__all__ = ["worker"]

HANDLER_PARAMETERS = 2
"""Session and message."""


def worker(
    target: Annotated[str, typer.Argument(metavar="MODULE:NAME", help="A worker, or a function that returns one.")],
    stop_seconds: Annotated[
        float, typer.Option(help="How long to drain after SIGTERM or Ctrl-C.", min=0)
    ] = STOP_SECONDS,
) -> None:
    """Run a worker until SIGTERM or Ctrl-C, then drain it.

    MODULE is imported with the current directory on the path, so `txbox worker billing:worker` runs the `worker` of
    billing.py. A second signal ends the process at once; whatever it had taken will be delivered again.

    Exit status 1 if draining took longer than allowed.
    """
    found = load(target)
    typer.echo(f"{found.inbox.subscriber_id} works on {found.source.name}; Ctrl-C drains and stops")
    drained = found.run(stop_seconds)
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
    module, name = find(target, such_as="billing:worker")
    module_name = module.__name__
    found = getattr(module, name, None)
    workers = sorted(known for known, value in vars(module).items() if isinstance(value, Worker))
    if found is None:
        hint = f"; it has {', '.join(workers)}" if workers else ""
        raise UsageError(f"module {module_name} has no {name}{hint}")
    what = f"{target} is a {type(found).__name__}"
    if wanted := _required_parameters(found):
        kind = "class" if isinstance(found, type) else type(found).__name__
        what = f"{target} is the {kind} {name}({', '.join(wanted)})"
    elif callable(found) and not isinstance(found, Worker):
        with own_code_of(f"{target}()"):
            found = found()
        what = f"{target}() returned a {type(found).__name__}"
    if not isinstance(found, Worker):
        raise UsageError(f"{what}, not a worker; {_instead(module_name, name, wanted, workers)}")
    return found


def _required_parameters(found: object) -> list[str]:
    """Return what has to be given when this is called; a function that makes a worker wants nothing."""
    if not callable(found):
        return []
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # written in C, without a signature
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in variable]


def _instead(module_name: str, name: str, wanted: list[str], workers: list[str]) -> str:
    """Say what to do instead: run a worker that is there, or make one of what looks like a handler."""
    if workers:
        return "run " + " or ".join(f"`txbox worker {module_name}:{worker}`" for worker in workers)
    if len(wanted) == HANDLER_PARAMETERS:
        subscriber = module_name.rpartition(".")[2]
        return (
            f"write `worker = SqsWorker(queue_url, inbox=Inbox({subscriber!r}), engine=engine, handler={name})` there, "
            f"and run `txbox worker {module_name}:worker`"
        )
    return "name a worker, or a function without parameters that returns one"
