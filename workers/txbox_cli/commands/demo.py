"""``txbox demo``: the main job, from nothing, in one command."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from txbox_cli.commands.demo_report import print_report
from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.options import read_url
from txbox_cli.output import plain_console, progress_bars
from txbox_cli.settings import aws_endpoint
from txbox_cli.signals import terminated_as_interrupt
from txbox_demo.purchases import TOTAL_PURCHASES

if TYPE_CHECKING:
    from txbox_demo.plan import Plan
    from txbox_demo.plan import Progress as RunProgress

__all__ = ["demo"]

DEFAULT_PURCHASES = 3_000
DEFAULT_KILLS = 24
PURCHASES_PER_KILL = 50
"""A run too small for the default number of kills has fewer."""

SECONDS_PER_LINE = 10.0
"""Between two lines of the same stage, where there is no terminal."""


def demo(
    purchases: Annotated[
        int, typer.Option(help=f"How many of the file's {TOTAL_PURCHASES:,} purchases.", min=1, max=TOTAL_PURCHASES)
    ] = DEFAULT_PURCHASES,
    workers: Annotated[
        int, typer.Option(help="Worker processes at a time, of billing and of notification each.", min=2, max=32)
    ] = 2,
    kills: Annotated[
        int | None,
        typer.Option(help=f"How many processes to kill; {DEFAULT_KILLS} unless the run is small.", min=0, max=1000),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random choices: what gets lost, and when processes die.")] = 1997,
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
    keep: Annotated[bool, typer.Option("--keep", help="Leave schema and queues behind, to look at them.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> int:
    """Send real purchases through a chain of services whose processes are killed, and count to the cent.

    A shop writes each purchase down and publishes it to its outbox, in one transaction; relays send it to SQS; billing
    adds it to its customer's account and publishes that, in one transaction; relays send that, too; and notification
    mails the customer, under a lease, because no transaction covers a mail. Processes of all four are killed with
    SIGKILL again and again, some between send and settle, between commit and ack, or between a mail and its completion;
    answers and acks get lost; some orders are rolled back, and some mails refused. At the end every account, and every
    mail that a local SMTP server has accepted, is compared with the file. In the last act Spark loads the whole file
    through billing's inbox, while workers are still busy with a part of it.

    Exit status 0 only if every customer is right to the cent, was mailed every purchase, and once wherever that can be
    known, and every order, send and delivery is accounted for. What cannot be known is counted: a worker that is killed
    between a mail and its completion leaves nobody who knows of the mail.
    """
    from txbox_demo.plan import Plan
    from txbox_demo.run import run_demo

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
    print_report(plain_console(), report)
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
        now_at = run.standing
        counts = f"{now_at.placed:,} placed, {now_at.billed:,} billed, {now_at.notified:,} notified"
        typer.echo(f"{run.stage}: {counts}, {run.kills} killed" if now_at.placed else run.stage, err=True)
        self._stage, self._next_at = run.stage, now + SECONDS_PER_LINE


class _Bars:
    """Four bars: placed, billed, notified, killed."""

    def __init__(self, progress: Progress, plan: "Plan") -> None:
        self._progress = progress
        self._placed = progress.add_task("orders placed", total=plan.purchases)
        self._billed = progress.add_task("billed", total=plan.purchases)
        self._notified = progress.add_task("notified", total=plan.purchases)
        self._kills = progress.add_task("processes killed", total=plan.kills)
        self._stage = ""

    def __call__(self, run: "RunProgress") -> None:
        self._progress.update(self._placed, completed=run.standing.placed)
        self._progress.update(self._billed, completed=run.standing.billed)
        self._progress.update(self._notified, completed=run.standing.notified)
        self._progress.update(self._kills, completed=run.kills)
        if run.stage != self._stage:
            self._stage = run.stage
            self._progress.console.print(f"{self._stage} …", style="dim")
