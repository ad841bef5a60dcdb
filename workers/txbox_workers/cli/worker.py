"""``txbox worker``: run a worker of yours as a process."""

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from txbox_workers.cli.errors import UsageError
from txbox_workers.worker import STOP_SECONDS, Worker

__all__ = ["worker"]


def worker(
    target: Annotated[str, typer.Argument(metavar="MODULE:NAME", help="A worker, or a function that returns one.")],
    stop_seconds: Annotated[
        float, typer.Option(help="How long to drain after SIGTERM or Ctrl-C.", min=0)
    ] = STOP_SECONDS,
) -> int:
    """Run a worker until SIGTERM or Ctrl-C, then drain it.

    MODULE is imported with the current directory on the path, so `txbox worker billing:worker` runs the `worker` of
    billing.py. A second signal ends the process at once; whatever it had taken will be delivered again.

    Exit status 1 if draining took longer than allowed.
    """
    found = load(target)
    typer.echo(f"{found.inbox.subscriber_id} works on {found.source.name}; Ctrl-C drains and stops", err=True)
    drained = found.run(stop_seconds)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.counts.items())) or "no deliveries"
    typer.echo(f"stopped: {counts}", err=True)
    if not drained:
        typer.echo(f"txbox: not drained within {stop_seconds:g} s; the rest will be delivered again", err=True)
    return 0 if drained else 1


def load(target: str) -> Worker:
    """Import a worker.

    Args:
        target: MODULE:NAME.

    Raises:
        UsageError: there is no such module or name, or it is not a worker.
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise UsageError(f"{target!r} is not of the form MODULE:NAME, such as billing:worker")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"module {module_name} needs {error.name}, which is not installed") from error
        raise UsageError(f"there is no module {module_name} here ({here}) or on the Python path") from error
    found = getattr(module, name, None)
    if found is None:
        workers = sorted(known for known, value in vars(module).items() if isinstance(value, Worker))
        hint = f"; it has {', '.join(workers)}" if workers else ""
        raise UsageError(f"module {module_name} has no {name}{hint}")
    if not isinstance(found, Worker) and callable(found):
        found = found()
    if not isinstance(found, Worker):
        raise UsageError(f"{target} is a {type(found).__name__}, not a worker or a function that returns one")
    return found
