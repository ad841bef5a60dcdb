"""``txbox demo``: see the main job done, from nothing, in one command."""

import json
import socket
import sys
import threading
import time
from contextlib import closing, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txbox.errors import install_command
from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.options import read_url
from txbox_cli.output import plain_console, print_counts, progress_bars
from txbox_cli.signals import terminated_as_interrupt
from txbox_demo.purchases import TOTAL_PURCHASES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from txbox_demo.checker import DemoReport
    from txbox_demo.page_server import DashboardPages
    from txbox_demo.run import Plan
    from txbox_demo.sandbox import Progress as RunProgress

DEFAULT_KILLS, PURCHASES_PER_KILL = 24, 50  # a run too small for the default number of kills gets fewer
SECONDS_PER_LINE = 10.0  # between two lines of the same stage outside a terminal


def demo(
    purchases: Annotated[int, typer.Option(help=f"Of {TOTAL_PURCHASES:,}.", min=1, max=TOTAL_PURCHASES)] = 3_000,
    workers: Annotated[int, typer.Option(help="At a time, of billing and notification each.", min=2, max=32)] = 2,
    kills: Annotated[int | None, typer.Option(help="24, unless the run is small.", min=0, max=1000)] = None,
    seed: Annotated[int, typer.Option(help="Of the random choices: what gets lost, and when processes die.")] = 1997,
    url: Annotated[str | None, typer.Option("--url", help="Your Postgres, in a schema of its own.")] = None,
    aws: Annotated[bool, typer.Option("--aws", help="Your AWS account's SQS, by boto3's own settings.")] = False,
    postgres: Annotated[bool, typer.Option("--postgres", help="Without SQS: workers read the outbox itself.")] = False,
    without_spark: Annotated[bool, typer.Option("--without-spark", help="Leave out the final stage.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave schema and queues behind, to look at them.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show it live in a browser; in a terminal, until Ctrl-C.")
    ] = False,
    dashboard_port: Annotated[
        int, typer.Option(help="The dashboard's, on 127.0.0.1; 0 is any that is free.", min=0, max=65535)
    ] = 0,
) -> int:
    """Send real purchases through a chain of services whose processes are killed, and count to the cent.

    A shop publishes each purchase to its outbox; relays send it to SQS; billing adds it to its customer's account and
    publishes that; and notification mails the customer, under a lease. Processes of all four are killed with SIGKILL
    again and again, answers and acks get lost, some orders are rolled back, and some mails refused. At the end every
    account and every mail is compared with the file. In the final stage Spark loads the whole file beside the workers.

    Without --url, Postgres is started; without --aws or AWS_ENDPOINT_URL, SQS. Exit status 0 only if every customer is
    right to the cent, and was mailed every purchase, once wherever that can be known; what cannot be known is counted.

    With --postgres there is neither SQS nor a relay: billing and notification take their messages from the outbox.

    With --dashboard, pages on this machine show the run while it goes on: their URL is printed at the start. In a
    terminal they stay at the end, with everything else, until Ctrl-C.
    """
    from txbox_cli.settings import aws_endpoint
    from txbox_demo.run import Plan, run_demo

    if url is not None:
        read_url(url)
    if json_file is not None:
        try:
            json_file.open("a").close()
        except OSError as error:
            raise UsageError(f"--json: cannot write {json_file}: {error.strerror}") from error
    if postgres and aws:
        raise UsageError("--postgres is without SQS, --aws with yours: choose one")
    if not without_spark:
        _require_spark()
    if keep and url is None:
        raise UsageError("--keep needs --url: the embedded database goes when the demo ends")
    kills = min(DEFAULT_KILLS, purchases // PURCHASES_PER_KILL) if kills is None else kills
    plan = Plan(purchases, workers, kills, seed, url, not (aws or aws_endpoint()), postgres, keep, not without_spark)
    console = plain_console(stderr=True)
    with (
        closing(_pages(dashboard_port)) if dashboard else nullcontext() as pages,
        terminated_as_interrupt(),
        progress_bars(console) if console.is_terminal else nullcontext() as bars,
    ):

        def on_report(report: "DemoReport") -> None:
            if bars:
                bars.stop()
            if json_file is not None:
                json_file.write_text(f"{json.dumps(report.as_dict(), indent=2)}\n")
            _print_result(plain_console(), report)
            if pages and sys.stdin.isatty():
                typer.echo("the dashboard stays until Ctrl-C", err=True)
                with suppress(KeyboardInterrupt):
                    threading.Event().wait()

        report = run_demo(plan, _Shown(bars, plan), pages=pages, on_report=on_report)
    return 0 if report.exact else 1


def _pages(port: int) -> "DashboardPages":
    """Listen before the work begins. Raise ``CommandFailed`` if a package is missing."""
    for name in ("jinja2", "starlette", "uvicorn"):
        if find_spec(name) is None:
            raise CommandFailed(f"--dashboard needs {name}: {install_command('dashboard')}, or leave it out")
    from txbox_demo.page_server import DashboardPages

    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        why = error.strerror or error
        raise CommandFailed(f"cannot listen on 127.0.0.1, port {port}: {why}; try another --dashboard-port") from error
    return DashboardPages(listener, lambda url: typer.echo(f"see it: {url}", err=True))


def _require_spark() -> None:
    """Raise ``CommandFailed`` if Spark cannot run: before the work, not after it."""
    from txbox_spark import SparkSetupError, require_jdk

    try:
        require_jdk()
        for name in ("pyspark", "py4j", "pyarrow"):
            if find_spec(name) is None:
                raise CommandFailed(f"the final stage needs {name}: {install_command('spark')}, or --without-spark")
    except SparkSetupError as error:
        raise CommandFailed(f"{error}; or leave the final stage out with --without-spark") from error


class _Shown:
    """Shows four bars in a terminal; elsewhere prints a line for each stage, and one now and then."""

    def __init__(self, bars: "Progress | None", plan: "Plan") -> None:
        self._bars, self._stage, self._next_at = bars, "", 0.0
        totals = dict.fromkeys(("placed", "billed", "notified"), plan.purchases) | {"killed": plan.kills}
        self._tasks = {name: bars.add_task(name, total=total) for name, total in totals.items()} if bars else {}

    def __call__(self, run: "RunProgress") -> None:
        is_new, now = run.stage != self._stage, time.monotonic()
        self._stage = run.stage
        if self._bars:
            if is_new:
                self._bars.console.print(f"{run.stage} …", style="dim")
            for name, task in self._tasks.items() if run.placed else ():
                self._bars.update(task, completed=getattr(run, name))
        elif is_new or now >= self._next_at:
            counts = f": {run.placed:,} placed, {run.billed:,} billed, {run.notified:,} notified, {run.killed} killed"
            typer.echo(run.stage + (counts if run.billed else ""), err=True)
            self._next_at = now + SECONDS_PER_LINE


def _print_result(console: "Console", report: "DemoReport") -> None:
    _print_report(console, report)
    if not report.exact:
        console.print("\nNOT EXACT: what is wrong is listed above, in capitals", style="bold")
        return
    killed = sum(sum(moments.values()) for moments in report.kills.values())
    console.print(f"\nEXACT: nothing was lost, and nothing was applied twice; processes killed: {killed}", style="bold")
    console.print("next: `txbox dev` starts servers for a service of yours; see docs/getting-started.md")


def _print_report(console: "Console", report: "DemoReport") -> None:
    wrong = {what: ids for what, ids in report.wrong.items() if ids}
    verdict = "THE ACCOUNTS ARE WRONG" if "accounts" in wrong else "every customer is right to the cent"
    if any(what.startswith("mails") for what in wrong):
        verdict += ", THE NOTIFICATIONS ARE WRONG"
    elif "mails" in report.figures:
        verdict += f", and was notified of every purchase: of {report.figures['mailed once'][0]:,} once"
        again = report.figures["mailed again"][0]
        verdict += f", of {again:,} again, as it cannot be known" if again else ""
    console.print(f"{verdict}; {report.seconds:.0f} s\n", style="bold")
    rows = [(name, figure, remark) for name, (figure, remark) in report.figures.items()]
    for role, moments in report.kills.items():
        where = ", ".join(f"{times} {moment}" for moment, times in moments.items())
        rows.append((f"kills: {role}", sum(moments.values()), where))
    print_counts(rows)
    console.print(", ".join(f"{name} ${cents // 100:,}.{cents % 100:02}" for name, cents in report.cents.items()))
    for what, ids in wrong.items():
        console.print(f"WRONG: {what.upper()}: {len(ids):,}, such as {', '.join(ids[:3])}")
    if report.kept:
        console.print(f"kept: {report.kept}")
    if report.spark_stage:
        console.print("\nfinal stage: Spark loads the whole file while workers process a part of it", style="bold")
        _print_report(console, report.spark_stage)
