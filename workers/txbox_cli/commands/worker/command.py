"""``txbox worker``: run a worker of yours as a process."""

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

from txbox.service import STOP_SECONDS
from txbox_cli import importer
from txbox_cli.commands.worker.member import Member
from txbox_cli.commands.worker.sql_worker import SqlWorker, sql_worker
from txbox_cli.commands.worker.supervisor import StartFailed, Supervisor
from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.health import HEALTH_HOST, HealthHostOption, HealthPortOption, health_of, probes_of
from txbox_cli.options import ReadBy
from txbox_cli.signals import hangup_terminates
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.worker import Worker

AnyWorker = Worker | AsyncWorker

HANDLER_PARAMETERS = 2
"""Session and message."""


def worker(
    *,
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:NAME", help="A worker, or a function that returns one.", show_default=False),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(help="How many processes, each with a worker of its own: for handlers that compute.", min=1),
    ] = 1,
    stop_seconds: Annotated[
        float, typer.Option(help="How long to drain after SIGTERM or Ctrl-C.", min=0)
    ] = STOP_SECONDS,
    health_port: HealthPortOption = None,
    health_host: HealthHostOption = HEALTH_HOST,
    sql: Annotated[SqlWorker, ReadBy(sql_worker)],
    supervisor: Annotated[
        int | None, typer.Option(hidden=True, help="The descriptor of the supervisor's socket.")
    ] = None,
) -> None:
    """Run a worker until SIGTERM or Ctrl-C, then drain it.

    MODULE is imported with the current directory on the path, so `txbox worker billing:worker` runs the `worker` of
    billing.py. A second signal ends the process at once; whatever it had taken will be delivered again.

    With `--processes 4`, four processes import MODULE and run the worker, each with threads and connections of its own.
    All are stopped as one; one that dies is replaced, up to four times in a row.

    Exit status 1 if draining took longer than allowed, or if processes die again and again.

    Where the effect is SQL, no Python is needed. For example:

    \b
    txbox worker --queue https://HOST/ACCOUNT/purchases --subscriber billing \\
      --apply a.sql --fields 'cents bigint at /total/cents not null'

    where a.sql is:

    \b
    INSERT INTO purchase (id, cents) SELECT message_id, cents FROM fresh_event

    With --publish-to, what the last statement returns is published: RETURNING id AS key, cents::text AS body
    """
    if supervisor is not None:
        _run_member(target, sql, Member(supervisor, stop_seconds), stop_seconds)
    if processes > 1:
        _run_processes(_command_of(context.obj), processes, stop_seconds, health_host, health_port)
        return
    with (
        _found(target, sql) as found,
        hangup_terminates(),
        health_of(found, health_host, health_port) as healthy,
    ):

        def started() -> None:
            healthy()
            typer.echo(f"{_works(found)}; Ctrl-C drains and stops")

        drained = _run(found, stop_seconds, started)
    _end(found.counts, drained, stop_seconds)


@contextmanager
def _found(target: str | None, sql: SqlWorker) -> Iterator[AnyWorker]:
    if target is None:
        with sql.made() as made:
            yield made
    elif sql.given:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in sql.given)
        raise UsageError(f"{target} has arguments of its own; leave out {given}, or MODULE:NAME")
    else:
        yield load(target)


def _run(found: AnyWorker, stop_seconds: float, started: Callable[[], object]) -> bool:
    if isinstance(found, AsyncWorker):
        return asyncio.run(found.run(stop_seconds, started=started))
    return found.run(stop_seconds, started=started)


def _run_member(target: str | None, sql: SqlWorker, member: Member, stop_seconds: float) -> NoReturn:
    with _found(target, sql) as found, hangup_terminates():
        member.takes(found)
        drained = _run(found, stop_seconds, lambda: member.started(_works(found)))
    member.ended(drained)
    raise typer.Exit(0 if drained else 1)


def _run_processes(
    command: Callable[[int], list[str]], processes: int, stop_seconds: float, host: str, port: int | None
) -> None:
    supervisor = Supervisor(command, processes, stop_seconds)

    def begun(works: str) -> None:
        typer.echo(f"{works} in {processes} processes; Ctrl-C drains and stops")

    with hangup_terminates(), probes_of(supervisor.why_not_live, supervisor.why_not_ready, host, port):
        try:
            drained = supervisor.run(begun)
        except StartFailed as error:
            raise typer.Exit(error.status) from error
    _end(supervisor.counts, drained, stop_seconds)


def _command_of(arguments: Sequence[str]) -> Callable[[int], list[str]]:
    """Return the command line that runs this very command as a supervisor's process, given a descriptor."""
    at = arguments.index("worker") + 1
    # -P: as with the script `txbox`, modules in the current directory do not shadow Python's own.
    program = [sys.executable, "-P", "-m", "txbox_cli", *arguments[:at]]
    return lambda descriptor: [*program, "--supervisor", str(descriptor), *arguments[at:]]


def _works(found: AnyWorker) -> str:
    return f"{found.subscriber_id} works on {found.source.name}"


def _end(counts: Mapping[Any, int], drained: bool, stop_seconds: float) -> None:
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no deliveries"
    typer.echo(f"stopped: {said}")
    if not drained:
        raise CommandFailed(f"not drained within {stop_seconds:g} s; the rest will be delivered again")


def load(target: str) -> AnyWorker:
    """Import a worker.

    Args:
        target: MODULE:NAME.

    Raises:
        UsageError: there is no such module or name, or it is not a worker.
        CommandFailed: the module exists, and its own code raised.
    """
    found = importer.load(target, lambda value: isinstance(value, AnyWorker), such_as="billing:worker")
    if not isinstance(found.value, AnyWorker):
        raise UsageError(f"{found.what}, not a worker; {_instead(found)}")
    return found.value


def _instead(found: importer.Imported) -> str:
    """Return what to do instead: run a worker that is there, or make one of what looks like a handler."""
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
