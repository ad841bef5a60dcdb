"""``txbox demo``: the main job, from nothing, in one command."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from txbox_workers.cli.errors import CommandFailed, UsageError
from txbox_workers.cli.options import read_url
from txbox_workers.cli.output import plain_console, progress_bars
from txbox_workers.cli.signals import terminated_as_interrupt
from txbox_workers.demo.purchases import TOTAL_PURCHASES
from txbox_workers.settings import aws_endpoint

if TYPE_CHECKING:
    from txbox_workers.demo.last_act import LastAct
    from txbox_workers.demo.run import Plan, Report
    from txbox_workers.demo.run import Progress as RunProgress

__all__ = ["demo"]

DEFAULT_PURCHASES = 7_000
DEFAULT_KILLS = 24
PURCHASES_PER_KILL = 50
"""A run too small for the default number of kills has fewer."""

SECONDS_PER_LINE = 10.0
"""Between two lines of the same stage, where there is no terminal."""


def demo(
    purchases: Annotated[
        int, typer.Option(help=f"How many of the file's {TOTAL_PURCHASES:,} purchases.", min=1, max=TOTAL_PURCHASES)
    ] = DEFAULT_PURCHASES,
    workers: Annotated[int, typer.Option(help="Worker processes at a time.", min=2, max=32)] = 3,
    kills: Annotated[
        int | None,
        typer.Option(help=f"How many workers to kill; {DEFAULT_KILLS} unless the run is small.", min=0, max=1000),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random choices: duplicates, and when workers die.")] = 1997,
    url: Annotated[
        str | None, typer.Option("--url", help="A Postgres of yours; without it, an embedded one. Uses its own schema.")
    ] = None,
    aws: Annotated[
        bool,
        typer.Option(
            "--aws", help="Your AWS account's SQS, by boto3's own settings. AWS_ENDPOINT_URL is used as it is."
        ),
    ] = False,
    without_spark: Annotated[
        bool, typer.Option("--without-spark", help="Leave out the last act, which needs txbox[spark] and a JDK.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave schema and queue behind, to look at them.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> int:
    """Send real purchases through a broker that duplicates and workers that are killed, and count to the cent.

    Purchases go to SQS, some twice, some again later, and some acks get lost. Workers add each purchase to its
    customer's account; they are killed with SIGKILL again and again, some between commit and ack. At the end every
    customer's account is compared with the file. In the last act Spark loads the whole file through the same inbox,
    while workers are still busy with a part of it.

    Exit status 0 only if every customer is right to the cent and every delivery is accounted for.
    """
    from txbox_workers.demo.run import Plan, run_demo

    if url is not None:
        read_url(url)
    if json_file is not None:
        _require_writable(json_file)
    if not without_spark:
        _require_spark()
    if keep and url is None:
        raise UsageError("--keep needs --url: the embedded database goes when the demo ends")
    plan = Plan(
        purchases=purchases,
        workers=workers,
        kills=min(DEFAULT_KILLS, purchases // PURCHASES_PER_KILL) if kills is None else kills,
        seed=seed,
        database_url=url,
        own_broker=not (aws or aws_endpoint()),
        keep=keep,
        last_act=not without_spark,
    )
    with terminated_as_interrupt(), _told(plan) as on_progress:
        report = run_demo(plan, on_progress)
    if json_file is not None:
        json_file.write_text(f"{json.dumps(report.as_dict(), indent=2)}\n")
    _print(plain_console(), report)
    return 0 if report.exact else 1


def _require_spark() -> None:
    """Find out before the work, not after it."""
    from txbox_spark import SparkSetupError, require_jdk

    try:
        require_jdk()
        for name in ("pyspark", "pyarrow"):
            if find_spec(name) is None:
                raise CommandFailed(f"the last act needs {name}: pip install 'txbox[spark]', or give --without-spark")
    except SparkSetupError as error:
        raise CommandFailed(f"{error}; or leave the last act out with --without-spark") from error


def _require_writable(file: Path) -> None:
    """Find out before the work, not after it."""
    try:
        file.open("a").close()
    except OSError as error:
        raise UsageError(f"--json: cannot write {file}: {error.strerror}") from error


@contextmanager
def _told(plan: "Plan") -> Iterator["Callable[[RunProgress], None]"]:
    console = plain_console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    with progress_bars(console) as progress:
        yield _Bars(progress, plan)


class _Lines:
    """Where nobody watches: a line for each stage, and one now and then."""

    def __init__(self) -> None:
        self._stage = ""
        self._next_at = 0.0

    def __call__(self, run: "RunProgress") -> None:
        now = time.monotonic()
        if run.stage == self._stage and now < self._next_at:
            return
        counts = f": {run.sent:,} sent, {run.processed:,} processed, {run.kills} workers killed" if run.sent else ""
        typer.echo(f"{run.stage}{counts}", err=True)
        self._stage, self._next_at = run.stage, now + SECONDS_PER_LINE


class _Bars:
    """Three bars: sent, processed, killed."""

    def __init__(self, progress: Progress, plan: "Plan") -> None:
        self._progress = progress
        self._sent = progress.add_task("sent", total=plan.purchases)
        self._processed = progress.add_task("processed", total=plan.purchases)
        self._kills = progress.add_task("workers killed", total=plan.kills)
        self._stage = ""

    def __call__(self, run: "RunProgress") -> None:
        self._progress.update(self._sent, completed=run.sent)
        self._progress.update(self._processed, completed=run.processed)
        self._progress.update(self._kills, completed=run.kills)
        if run.stage != self._stage:
            self._stage = run.stage
            self._progress.console.print(f"{self._stage} …", style="dim")


def _print(console: Console, report: "Report") -> None:
    figures = report.as_dict()
    kills, sent = figures["kills"], figures["sent"]
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column(style="dim")
    redelivered = max(figures["delivered"] - sent["messages"], 0)
    where_killed = (
        f"{kills['committed']} between commit and ack, {kills['handling']} between insert and commit, "
        f"{kills['received']} before the transaction, {kills['anywhere']} anywhere"
    )
    rows = [
        (
            "sent",
            sent["messages"],
            f"{sent['resent']:,} again later, {sent['in_batches_sent_twice']:,} in a batch twice",
        ),
        ("delivered", figures["delivered"], f"{redelivered:,} again by the broker: lost acks, killed workers"),
        ("processed", figures["processed"], "messages in the inbox"),
        ("duplicates rejected", figures["duplicates_rejected"], f"{figures['duplicate_share']:.0%} of the purchases"),
        ("failed", figures["failed"], ""),
        ("in flight", figures["in_flight"], "in the hands of killed workers"),
        ("kills", kills["total"], where_killed),
        ("dead", figures["dead"], "dead letters"),
        ("customers", figures["customers"], f"{len(report.comparison.wrong)} wrong"),
    ]
    for name, value, remark in rows:
        table.add_row(name, f"{value:,}", remark)
    table.add_row("by the file", f"${_grouped(figures['expected_dollars'])}", "added up without a database")
    table.add_row("in the accounts", f"${_grouped(figures['found_dollars'])}", "added up by the workers")
    table.add_row("difference", f"${_grouped(figures['difference_dollars'])}", "over all customers, without signs")
    console.print(table)
    balance = (
        f"deliveries {figures['delivered']:,} = {figures['processed']:,} processed + "
        f"{figures['duplicates_rejected']:,} duplicates + {figures['failed']:,} failed + "
        f"{figures['in_flight']:,} in flight"
    )
    console.print(balance if report.deliveries.adds_up else f"DOES NOT ADD UP: {balance}")
    for contradiction in report.deliveries.contradictions:
        console.print(f"CONTRADICTION: {contradiction}")
    verdict = "every customer is right to the cent" if report.comparison.exact else "THE ACCOUNTS ARE WRONG"
    console.print(f"{verdict}; {report.seconds:.0f} s, {report.workers_started} workers started", style="bold")
    if report.last_act is not None:
        _print_last_act(console, report.last_act)
    if report.plan.keep:
        console.print(f"kept: schema {report.schema}, queue {report.queue_url}")


def _print_last_act(console: Console, act: "LastAct") -> None:
    load = act.load
    console.print("\nlast act: Spark loads the whole file while workers process a part of it", style="bold")
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column(style="dim")
    begun = (
        f"writer {load['writer']}, {load['chunks']} chunks; {act.left_for_workers:,} messages were sent after the first"
    )
    rows = [
        ("read by Spark", load["read"], begun),
        ("applied by Spark", load["applied"], "events that were first"),
        ("found processed", load["already_processed"], "events that workers had been first with"),
        ("applied by workers", act.processed_by_workers, "messages that were first"),
        ("rejected by workers", act.rejected_by_workers, "among them those that Spark had been first with"),
        ("in the inbox", act.recorded, "both roads together"),
    ]
    for name, value, remark in rows:
        table.add_row(name, f"{value:,}", remark)
    comparison = act.comparison
    for name, cents in (
        ("by the file", comparison.expected_cents),
        ("in the accounts", comparison.found_cents),
        ("difference", comparison.difference_cents),
    ):
        table.add_row(name, f"${cents // 100:,}.{cents % 100:02}", "")
    console.print(table)
    balance = f"{load['read']:,} purchases = {load['applied']:,} by Spark + {act.processed_by_workers:,} by workers"
    console.print(balance if act.adds_up else f"DOES NOT ADD UP: {balance}")
    verdict = "every customer is right to the cent" if comparison.exact else "THE ACCOUNTS ARE WRONG"
    console.print(f"{verdict}; {act.seconds:.0f} s", style="bold")


def _grouped(dollars: str) -> str:
    whole, _, cents = dollars.partition(".")
    return f"{int(whole):,}.{cents}"
