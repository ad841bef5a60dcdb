"""``txbox maintain``: forget what was kept long enough, as a process or from cron."""

import logging
import re
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import typer

from txbox import InvalidConfiguration
from txbox.maintenance import Maintainer, Retention
from txbox.maintenance.maintainer import BUDGET_MS_PER_SECOND, FEWEST_ROWS, GENERATIONS, ROWS_PER_TRANSACTION
from txbox.service import STOP_SECONDS
from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.health import HEALTH_HOST, HealthHostOption, HealthPortOption, health_of
from txbox_cli.options import DatabaseOptions, JsonOption, read_span
from txbox_cli.output import print_counts, print_json
from txbox_cli.signals import hangup_terminates


def _keep(what: str) -> Any:
    return typer.Option(metavar="SPAN", help=f"Keep {what} for so long: 12h, 30d. Without it, for ever.")


def maintain(
    db: DatabaseOptions,
    once: Annotated[bool, typer.Option("--once", help="Do what is due, and end: for cron and Kubernetes.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go; nothing is written.")] = False,
    keep_inbox: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SUBSCRIBER=SPAN",
            help="Keep a subscriber's ids for so long: billing=30d; *=90d for those not named. May be repeated. "
            "Without it, for ever.",
        ),
    ] = None,
    keep_leases: Annotated[str | None, _keep("completed leases")] = None,
    keep_results: Annotated[str | None, _keep("results of completed leases")] = None,
    keep_responses: Annotated[str | None, _keep("responses to HTTP requests")] = None,
    keep_letters: Annotated[str | None, _keep("dead letters that were redriven or discarded")] = None,
    keep_operations: Annotated[str | None, _keep("the record of finished redrives and discards by filter")] = None,
    keep_sent: Annotated[str | None, _keep("sent messages")] = None,
    keep_loads: Annotated[str | None, _keep("the ledger of finished bulk loads")] = None,
    keep_staging: Annotated[str | None, _keep("staging tables of bulk loads that were left unfinished")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Accept windows that are shorter than a queue keeps its messages.")
    ] = False,
    budget_ms: Annotated[
        float,
        typer.Option(help="Milliseconds of each second that its work may take; 1000 is no limit.", min=1, max=1000),
    ] = BUDGET_MS_PER_SECOND,
    rows: Annotated[
        int, typer.Option(help="Rows that one transaction removes at most.", min=FEWEST_ROWS)
    ] = ROWS_PER_TRANSACTION,
    generations: Annotated[
        int,
        typer.Option(help="Of a rotating inbox: with 4, one is opened for each third of the window.", min=2, max=12),
    ] = GENERATIONS,
    stop_seconds: Annotated[
        float, typer.Option(help="How long to finish after SIGTERM or Ctrl-C.", min=0)
    ] = STOP_SECONDS,
    health_port: HealthPortOption = None,
    health_host: HealthHostOption = HEALTH_HOST,
    as_json: JsonOption = False,
) -> None:
    """Forget what was kept long enough, until SIGTERM or Ctrl-C, or --once.

    Run as many as you like: one works, the others wait. Without windows, only garbage goes: failures of messages that
    are processed, rows of relays, workers and chunks that are gone, staging tables of loads that are finished.

    Where ids are forgotten, their subscriber's horizon moves first: a message of known age that was sent before it is
    not run any more. A window must be at least as long as the queue keeps its messages, 14 days if that is not known.

    \b
    txbox maintain --keep-inbox billing=30d --keep-inbox '*=90d'

    From cron, once a day or more often:

    \b
    txbox maintain --once --keep-inbox '*=90d' --keep-letters 180d

    Each window may come from the environment: TXBOX_KEEP_INBOX="billing=30d *=90d", TXBOX_KEEP_LEASES=30d and so on.

    --json is for --once and --dry-run. Exit status 1 if it cannot work here, if the database has refused a task (the
    others are done), or if finishing took longer than allowed.
    """
    if as_json and not (once or dry_run):
        raise UsageError("--json needs --once or --dry-run: a service reports in its log and in `txbox status`")
    if health_port is not None and (once or dry_run):
        raise UsageError("--health-port is for a service; leave out --once and --dry-run, or --health-port")
    retention = _retention(
        keep_inbox,
        leases=keep_leases,
        results=keep_results,
        responses=keep_responses,
        letters=keep_letters,
        operations=keep_operations,
        sent=keep_sent,
        loads=keep_loads,
        staging=keep_staging,
    )
    with db.engine(pool_size=2, hide_parameters=True) as engine:
        made = Maintainer(
            engine,
            retention,
            schema=db.schema,
            prefix=db.prefix,
            force=force,
            budget_ms_per_second=budget_ms,
            rows_per_transaction=rows,
            generations=generations,
        )
        if dry_run:
            _print_plan(made, as_json=as_json)
        elif once:
            _run_once(made, as_json=as_json)
        else:
            what = f"maintaining {db.url.database} on {db.url.host or 'this machine'}"
            _run(made, stop_seconds, what, health_host, health_port)


def _run(maintainer: Maintainer, stop_seconds: float, what: str, health_host: str, health_port: int | None) -> None:
    logging.getLogger("txbox.maintenance").setLevel(logging.INFO)
    with hangup_terminates(), health_of(maintainer, health_host, health_port) as healthy:

        def started() -> None:
            healthy()
            typer.echo(f"{what}; Ctrl-C finishes and stops")

        finished = maintainer.run(stop_seconds, started=started)
    typer.echo("stopped")
    if not finished:
        raise CommandFailed(f"not finished within {stop_seconds:g} s; the next maintainer goes on from there")


def _run_once(maintainer: Maintainer, *, as_json: bool) -> None:
    report = maintainer.run_once()
    if as_json:
        print_json({**asdict(report), "seconds": round(report.seconds, 3)})
    elif not report.worked:
        typer.echo("another maintainer works on this database; nothing was done")
    else:
        print_counts([(task, count, "") for task, count in report.removed.items()])
    if report.failed:
        raise CommandFailed("; ".join(f"{task} was not done: {why}" for task, why in report.failed.items()))


def _print_plan(maintainer: Maintainer, *, as_json: bool) -> None:
    plan = maintainer.plan()
    if as_json:
        print_json([{"task": one.task, "rows": one.rows, "exact": one.exact} for one in plan])
    else:
        print_counts([(one.task, one.rows, "would go" if one.exact else "would go; estimated") for one in plan])


def _retention(inbox: list[str] | None, **others: str | None) -> Retention:
    """Read each window from its option, or else from its variable. An error names the one that it came from."""
    from txbox_cli.settings import Settings

    settings = Settings()
    origin = {name: f"--keep-{name}" if text else f"TXBOX_KEEP_{name.upper()}" for name, text in others.items()}
    origin["inbox"] = "--keep-inbox" if inbox else "TXBOX_KEEP_INBOX"
    windows = _windows(origin["inbox"], inbox or (settings.keep_inbox or "").split())
    texts = {name: text or getattr(settings, f"keep_{name}") for name, text in others.items()}
    spans = {name: read_span(origin[name], text) for name, text in texts.items() if text}
    try:
        return Retention(inbox=windows, **spans)
    except InvalidConfiguration as error:
        raise UsageError(re.sub(r"^Retention\.(\w+)", lambda found: origin[found[1]], str(error))) from error


def _windows(origin: str, given: list[str]) -> dict[str, timedelta]:
    windows = {}
    for text in given:
        name, equals, span = text.rpartition("=")
        if not equals or not name:
            raise UsageError(f"{origin} must be SUBSCRIBER=SPAN, such as billing=30d or *=90d, not {text!r}")
        windows[name] = read_span(origin, span)
    return windows
