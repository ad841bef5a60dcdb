"""The main job: order, relay, bill, relay, notify, kill, and check."""

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from txbox import TxboxError
from txbox.operations.audit import audit
from txbox_aws.sqs import sqs_client
from txbox_demo.checker import CHAIN, DemoReport, check
from txbox_demo.processes import N_DUPLICATES, N_RECEIVED, N_ROLLED_BACK, N_SENT, DemoTask
from txbox_demo.purchases import read_purchases
from txbox_demo.sandbox import OnProgress, Progress, Sandbox
from txbox_demo.spark_stage import run_spark_stage
from txbox_demo.supervisor import DemoSupervisor, Group
from txbox_local import LocalAws, LocalPostgres, LocalSmtp

if TYPE_CHECKING:
    from txbox_demo.page_server import DashboardPages

MAX_TMPDIR_BYTES = (103 if sys.platform == "darwin" else 107) - 32  # of a socket's path, less what multiprocessing adds
REFUSED_MAIL_SHARE = 0.02  # by the server, before it has received their text
DELIVERIES_PER_MESSAGE = 1.3  # about: answers and acks get lost


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a run."""

    purchases: int
    workers: int  # of billing and of notification each, at a time
    kills: int  # of processes, across all roles
    seed: int
    database_url: str | None = None  # if None, a Postgres is started
    own_broker: bool = True  # start one; otherwise boto3's own settings lead to SQS
    postgres: bool = False  # workers take their messages from the database: no broker, no relays
    keep: bool = False
    spark_stage: bool = False

    def groups(self) -> list[Group]:
        """Return the chain's processes. Billing gets a third of the kills; shop and relays get the rest."""
        billing, notification = -(-self.kills // 3), self.kills // 4
        relay = 0 if self.postgres else (self.kills - billing - notification + 1) * 3 // 5
        shop, deliveries = self.kills - billing - notification - relay, round(self.purchases * DELIVERIES_PER_MESSAGE)
        return [
            Group("shop", 2, shop, self.purchases),
            *([] if self.postgres else [Group("relay", 2, relay, 2 * deliveries)]),
            Group("billing", self.workers, billing, deliveries),
            Group("notification", self.workers, notification, deliveries),
        ]


def run_demo(
    plan: Plan,
    on_progress: OnProgress = lambda _: None,
    *,
    pages: "DashboardPages | None" = None,
    on_report: Callable[[DemoReport], None] = lambda _: None,
) -> DemoReport:
    """Run the main job, or raise a TxboxError. The environment keeps the variables that lead to a broker of its own.

    Args:
        on_progress: called again and again during the run.
        pages: show the run.
        on_report: called at the end, while everything can still be looked at.
    """
    if len(os.fsencode(path := tempfile.gettempdir())) > MAX_TMPDIR_BYTES:
        raise TxboxError(f"{path} is too long for the socket by which processes start: set TMPDIR to a shorter path")
    on_progress(Progress("starting servers"))
    with ExitStack() as cleanup:
        directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="txbox-demo-")))
        chance = random.Random(plan.seed)  # noqa: S311 - choices of the demo, no secrets
        smtp = cleanup.enter_context(LocalSmtp(refuses=lambda: chance.random() < REFUSED_MAIL_SHARE))
        url = plan.database_url or cleanup.enter_context(LocalPostgres()).url
        if plan.own_broker and not plan.postgres:
            os.environ.update(cleanup.enter_context(LocalAws()).environment())
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        client = None if plan.postgres else cleanup.enter_context(closing(sqs_client("")))
        on_progress(Progress(f"creating tables{' and queues' if client else ''}"))
        sandbox = Sandbox.open(url, client, cleanup, keep=plan.keep)
        if pages:
            pages.show(sandbox, cleanup)
        task = DemoTask(sandbox.url, sandbox.queue_urls, plan.purchases, smtp.port, environment, plan.seed)
        supervisor = DemoSupervisor(plan.groups(), task, sandbox, directory)
        cleanup.callback(supervisor.kill)
        shop, begun = supervisor.groups[0], time.monotonic()
        progress = supervisor.drive(
            "processing",
            on_progress,
            is_ending=lambda: all(process.exitcode == 0 for process, _ in shop.running.values()),
            is_done=lambda now: min(now.placed, now.billed, now.notified) >= plan.purchases,
        )
        queues = f", queues {' '.join(sandbox.queue_urls)}" if client else ""
        kept = f"schema {sandbox.schema}{queues}" if plan.keep else ""
        seconds = round(time.monotonic() - begun, 1)
        on_progress(replace(progress, stage="checking"))
        report = check(sandbox.engine, read_purchases(plan.purchases), smtp.accepted, CHAIN)
        figures = _figures(sandbox, supervisor.groups, progress, report.wrong) | report.figures
        kills = {group.name: dict(group.killed) for group in supervisor.groups}
        report = replace(report, figures=figures, kills=kills, seconds=seconds, kept=kept)
        if plan.spark_stage:
            sandbox = Sandbox.open(url, client, cleanup, keep=plan.keep)
            if pages:
                pages.show(sandbox, cleanup, "/final-stage")
            task = replace(task, database_url=sandbox.url, queue_urls=(sandbox.queue_urls[0], ""))
            report = replace(report, spark_stage=run_spark_stage(sandbox, task, directory, cleanup, on_progress))
        on_report(report)
        return report


def _figures(
    sandbox: Sandbox, groups: Sequence[Group], progress: Progress, wrong: dict[str, list[str]]
) -> dict[str, tuple[int, str]]:
    shop, *relays, billing, notification = groups
    figures = {
        "orders": (progress.placed, "committed by the shop, each with its message"),
        "rolled back": (shop.count(N_ROLLED_BACK), "orders with their messages: declined cards"),
    }
    for relay in relays:
        remark = "by the relays; again if one was killed or an answer was lost"
        figures["sent"] = (relay.count(N_SENT), remark)
    workers = (billing, notification)
    for group, url, processed in zip(workers, sandbox.queue_urls, (progress.billed, progress.notified), strict=True):
        duplicates = group.count(N_DUPLICATES)
        figures |= {
            f"{group.name}: delivered": (group.count(N_RECEIVED), "to workers"),
            f"{group.name}: processed": (processed, "messages, in its inbox or its ledger"),
            f"{group.name}: duplicates": (duplicates, "rejected; each would have been applied a second time"),
        }
        if not relays:  # no record of what was sent is left: settled messages are deleted
            continue
        audited = audit(sandbox.engine, [url], sandbox.engine, group.name, in_flight=timedelta(0))
        wrong[f"audit of {group.name}"] = [one.message_id for one in audited.findings if not audited.balanced]
        sent, remark = audited.counts["sent"], f"ids sent, of which {audited.counts['processed']:,} are processed"
        remark += f"; {audited.faults} are missing, foreign, doubled or overdue"
        figures[f"audit of {group.name}"] = (sent, remark)
    return figures
